"""/v1/chat/completions: the events of a chat as one response or as a stream of chunks."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.chat import events as chat
from quire.server.api.chat import protocol as api
from quire.server.api.chat.run import fold, run_chat
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, choices_response
from quire.server.http.state import context_of
from quire.server.models.use import use_model


async def create_chat_completion(request: Request) -> ASGIApp:
    """POST /v1/chat/completions"""
    context = context_of(request)
    context.field_names["prompt"] = "messages"
    body = await read_struct(request, api.ChatCompletionRequest)
    context.adopt_id(body.request_id)
    model = await use_model(request, body.model)
    answer_id = f"chatcmpl-{context.request_id}"
    events = run_chat(model, body, answer_id, request)
    if body.stream:
        frames = _frames(events, body, answer_id, context.model)
        return await sse.event_stream(request, frames, error_event=sse.openai_error)
    answer = await sse.unless_disconnected(request, fold(events, id=answer_id, model=context.model))
    answer.service_tier = body.service_tier or UNSET
    return await choices_response(answer)


async def _frames(
    events: AsyncGenerator[chat.ChatEvent, None], body: api.ChatCompletionRequest, answer_id: str, model: str
) -> sse.Events:
    chunks = _Chunks(body, answer_id, model)
    async with aclosing(events):
        async for event in events:
            for chunk in chunks.of(event):
                yield sse.frame(msgspec.json.encode(chunk))
    yield sse.DONE


class _Chunks:
    """Converts events to chunks: the role first for each choice, and the usage last if it was requested."""

    def __init__(self, body: api.ChatCompletionRequest, answer_id: str, model: str) -> None:
        self._body = body
        self._blank = api.ChatCompletionChunk(id=answer_id, created=int(time.time()), model=model, choices=[])
        if body.includes_usage:
            self._blank.usage = None
        self._begun: set[int] = set()
        self._prompt = chat.PromptEvent(None, None)

    def of(self, event: chat.ChatEvent) -> list[api.ChatCompletionChunk]:
        """The chunks of one event."""
        match event:
            case chat.PromptEvent():
                self._prompt = event
                return []
            case chat.UsageEvent():
                return self._usage(event)
            case _:
                chunks = [] if event.index in self._begun else [self._first(event.index)]
                chunk = self._chunk(_choice(event))
                if isinstance(event, chat.ChoiceFinished) and event.timings is not None:
                    chunk.timings = event.timings
                return [*chunks, chunk]

    def _chunk(self, *choices: api.ChatChunkChoice) -> api.ChatCompletionChunk:
        return msgspec.structs.replace(self._blank, choices=list(choices))

    def _first(self, index: int) -> api.ChatCompletionChunk:
        chunk = self._chunk(api.ChatChunkChoice(index, api.ChatDelta(role="assistant", content="")))
        if not self._begun:
            chunk.prompt_token_ids = UNSET if self._prompt.token_ids is None else self._prompt.token_ids
            chunk.prompt_logprobs = UNSET if self._prompt.logprobs is None else self._prompt.logprobs
        self._begun.add(index)
        return chunk

    def _usage(self, event: chat.UsageEvent) -> list[api.ChatCompletionChunk]:
        if event.timings is None:  # the usage so far, for the following chunks
            self._blank.usage = event.usage
            return []
        if not self._body.includes_usage:
            return []
        return [msgspec.structs.replace(self._blank, usage=event.usage, timings=event.timings)]


def _choice(event: chat.ChoiceEvent) -> api.ChatChunkChoice:
    match event:
        case chat.ContentDelta(index, text, logprobs, token_ids, drafted):
            logprobs_of = None if logprobs is None else api.ChatLogprobs(logprobs)
            ids = UNSET if token_ids is None else token_ids
            delta = api.ChatDelta(content=text)
            return api.ChatChunkChoice(index, delta, logprobs_of, token_ids=ids, drafted=drafted or UNSET)
        case chat.ReasoningDelta(index, text, drafted):
            delta = api.ChatDelta(reasoning_content=text, reasoning=text)
            return api.ChatChunkChoice(index, delta, drafted=drafted or UNSET)
        case chat.ToolCallDelta(index, tool_index, call_id, name, arguments):
            function = api.FunctionCallDelta(UNSET if name is None else name, arguments)
            first = () if call_id is None else (call_id, "function")
            call = api.ToolCallChunk(tool_index, function, *first)
            return api.ChatChunkChoice(index, api.ChatDelta(tool_calls=[call]))
        case chat.ChoiceFinished(index, finish_reason, stop_reason):
            return api.ChatChunkChoice(index, api.ChatDelta(), None, finish_reason, stop_reason)


ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions", "POST", create_chat_completion, "Answer a conversation",
        request=api.ChatCompletionRequest, response=api.ChatCompletion, chunk=api.ChatCompletionChunk, generates=True,
    ),
)  # fmt: skip
