"""`/v1/messages`: chat in Anthropic's protocol."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.chat.output import ChatPlan
from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.chat.run import make_prompt, run_chat
from quire.server.api.messages.input import chat_request, prompt_request
from quire.server.api.messages.protocol import CountTokensRequest, Message, MessagesRequest, TokenCount
from quire.server.api.messages.stream import Event, MessageBuilder
from quire.server.api.responses.input import new_id
from quire.server.api.shared.fields import StreamOptions
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import ANTHROPIC_PATH, ApiError
from quire.server.http.sse import event_frame, event_stream, frame, framed, read_all, unless_disconnected
from quire.server.http.state import context_of
from quire.server.models.served_model import ServedModel
from quire.server.models.use import use_model

_FIELD_NAMES = {
    "prompt": "messages", "stop": "stop_sequences", "max_tokens": "max_tokens", "response_format": "output_config",
    "tenant": "metadata.user_id", "continue_final_message": "messages", ".function.parameters": ".input_schema",
    ".function": "", "tool_choice='any'": "tool_choice.type='any'",
}  # fmt: skip
PING = frame(b'{"type":"ping"}', "ping")


async def create(request: Request) -> ASGIApp:
    """Answer a conversation."""
    context_of(request).field_names |= _FIELD_NAMES
    body = await read_struct(request, MessagesRequest)
    model = await use_model(request, body.model)
    chat = msgspec.convert(chat_request(body), ChatCompletionRequest)
    builder = MessageBuilder(new_id("msg"), context_of(request).model)
    events = _events(request, model, chat, builder)
    if body.stream:  # the first event contains the number of prompt tokens
        chat.stream, chat.stream_options = True, StreamOptions(include_usage=True, continuous_usage_stats=True)
        frames = framed(events, event_frame)
        return await event_stream(request, frames, error_event=_error_frame, keep_alive=PING)
    await unless_disconnected(request, read_all(events))
    return json_response(builder.message)


async def count_tokens(request: Request) -> ASGIApp:
    """Count the tokens of this conversation's prompt."""
    context_of(request).field_names |= _FIELD_NAMES
    body = await read_struct(request, CountTokensRequest)
    model = await use_model(request, body.model)
    chat = msgspec.convert(prompt_request(body), ChatCompletionRequest)
    prompt = await make_prompt(model, chat, ChatPlan(model, chat))
    return json_response(TokenCount(len(prompt["prompt_token_ids"])))


async def _events(
    request: Request, model: ServedModel, chat: ChatCompletionRequest, builder: MessageBuilder
) -> AsyncGenerator[Event, None]:
    async with aclosing(run_chat(model, chat, builder.message.id, request)) as chat_events:
        async for chat_event in chat_events:
            for event in builder.feed(chat_event):
                yield event
    for event in builder.finish():
        yield event


def _error_frame(error: ApiError) -> bytes:
    return frame(error.to_json(ANTHROPIC_PATH), "error")


ENDPOINTS = (
    Endpoint(
        "/v1/messages", "POST", create, "Answer a conversation, in Anthropic's protocol",
        request=MessagesRequest, response=Message, chunk=dict[str, Any], generates=True,
    ),
    Endpoint(
        "/v1/messages/count_tokens", "POST", count_tokens, "Count the tokens of a conversation",
        request=CountTokensRequest, response=TokenCount,
    ),
)  # fmt: skip
