"""/api/chat and /api/generate: chats in Ollama's form, by default as a stream of lines of JSON."""

import time

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.chat.output import ChatPlan
from quire.server.api.chat.prompt import ChatPrompt
from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.chat.run import make_prompt, run_chat
from quire.server.api.ollama import protocol as api
from quire.server.api.ollama.input import FIELD_NAMES, chat_of_chat, chat_of_generate, keep_alive_s
from quire.server.api.ollama.stream import AnswerBuilder
from quire.server.api.shared.sampling import check_generates
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.state import context_of, state_of
from quire.server.models.served_model import ServedModel
from quire.server.models.use import use_model

_CONTEXT_NAMES = {"is not one of this model's": "of context is not one of this model's"}
"""A token id that does not exist comes from `context`: the tokens of a text all exist."""


async def chat(request: Request) -> ASGIApp:
    """POST /api/chat"""
    context_of(request).field_names |= FIELD_NAMES
    body = await read_struct(request, api.ChatRequest)
    return await _answer(request, body, chat_of_chat(body) if body.messages else None)


async def generate(request: Request) -> ASGIApp:
    """POST /api/generate"""
    context_of(request).field_names |= {**FIELD_NAMES, "prompt": "prompt", **_CONTEXT_NAMES}
    body = await read_struct(request, api.GenerateRequest)
    return await _answer(request, body, chat_of_generate(body) if body.prompt else None)


async def _answer(
    request: Request, body: api.ChatRequest | api.GenerateRequest, chat: ChatCompletionRequest | None
) -> ASGIApp:
    """Answer the chat. None: only load the model, or put it to sleep with a `keep_alive` of 0."""
    pool, context, began_s = state_of(request).models, context_of(request), time.monotonic()
    entry, is_chat = pool.find(body.model), isinstance(body, api.ChatRequest)
    kept_s = entry.keep_alive_s if body.keep_alive is None else keep_alive_s(body.keep_alive)
    if chat is None and body.keep_alive is not None and kept_s == 0:
        await pool.unload(entry)
        return json_response(AnswerBuilder(body.model, began_s, 0, is_chat=is_chat).done(reason="unload"))
    model = await use_model(request, body.model)
    if body.keep_alive is not None:
        pool.set_keep_alive(entry, kept_s)
    builder = AnswerBuilder(body.model, context.start_s, time.monotonic() - began_s, is_chat=is_chat)
    if chat is None:
        return json_response(builder.done(reason="load"))
    check_generates(model, "/api/embed")
    prompt = await _prompt(model, body, chat) if isinstance(body, api.GenerateRequest) else None
    events = run_chat(model, chat, f"ollama-{context.request_id}", request, prompt)
    if body.stream is not False:
        lines = sse.framed(builder.stream(events), sse.json_line)
        return await sse.event_stream(request, lines, error_event=sse.error_line, keep_alive=b"", kind=sse.NDJSON)
    return json_response(await sse.unless_disconnected(request, builder.fold(events)))


async def _prompt(model: ServedModel, body: api.GenerateRequest, chat: ChatCompletionRequest) -> ChatPrompt | None:
    """The prompt after `context`, or without the template if it is `raw`; None: as for any chat."""
    if body.raw:
        text = body.prompt or ""
        prompt = ChatPrompt(prompt=text, prompt_token_ids=await model.llm.tokenize(text))
    elif body.context:
        prompt = await make_prompt(model, chat, ChatPlan(model, chat))
    else:
        return None
    prompt["prompt_token_ids"] = [*(body.context or ()), *prompt["prompt_token_ids"]]
    return prompt


ENDPOINTS = (
    Endpoint(
        "/api/chat", "POST", chat, "Answer a conversation, in Ollama's form",
        request=api.ChatRequest, response=api.ChatAnswer, chunk=api.ChatAnswer, generates=True,
    ),
    Endpoint(
        "/api/generate", "POST", generate, "Answer a prompt, in Ollama's form",
        request=api.GenerateRequest, response=api.GenerateAnswer, chunk=api.GenerateAnswer, generates=True,
    ),
)  # fmt: skip
