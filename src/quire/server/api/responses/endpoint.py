"""`/v1/responses`: responses that are stored, continued, and generated in the background."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.api.chat.output import ChatPlan
from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.chat.run import make_prompt, run_chat
from quire.server.api.responses import protocol as api
from quire.server.api.responses.input import chat_request, check_request, is_response_id, new_id, own_items
from quire.server.api.responses.references import item_ids, read_references
from quire.server.api.responses.run import BackgroundRun, Run, StoredResponses, stored
from quire.server.api.responses.store import StoredResponse
from quire.server.api.responses.stream import ResponseBuilder
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import ApiError, invalid
from quire.server.http.sse import event_frame, event_stream, framed, read_all, unless_disconnected
from quire.server.http.state import ServerState, context_of, state_of
from quire.server.models.served_model import ServedModel
from quire.server.models.use import use_model

MAX_LISTED = 100
_QUICK_ITEMS = 256
"""Number of items that are converted at once; more are converted in a thread."""
_FIELD_NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text",
    ".function": "", ".allowed_tools": ".tools",
}  # fmt: skip
_SAME_NAMES = ("previous_response_id", "instructions", "max_output_tokens", "max_tool_calls", "user",
               "safety_identifier", "prompt_cache_key")  # fmt: skip


def stored_responses(state: ServerState) -> StoredResponses:
    """The responses kept between requests; the first call opens the store. Raises ConfigError if that fails."""
    if state.responses is None:
        state.responses = StoredResponses(state.args)
    return state.responses


async def create(request: Request) -> ASGIApp:
    """Create a response: whole, as a stream, or in the background."""
    body = await read_struct(request, api.ResponsesRequest)
    state, owner = state_of(request), context_of(request).tenant
    responses = stored_responses(state)
    with responses.beginning(owner) if body.background else contextlib.nullcontext():
        run = await _make_run(request, body, responses, owner)
        await unless_disconnected(request, run.begin())
        background = responses.start(run, owner, keeps_frames=bool(body.stream)) if body.background else None
    if background is not None:
        context_of(request).background = background.task
        return await _stream(request, background.frames()) if body.stream else json_response(run.builder.response)
    if body.stream:
        return await _stream(request, framed(run.events(), event_frame))
    await unless_disconnected(request, read_all(run.events()))
    if run.error is not None:
        raise run.error
    return json_response(run.builder.response)


async def count_input_tokens(request: Request) -> ASGIApp:
    """Count the tokens of a response's prompt, without generating."""
    body = await read_struct(request, api.ResponsesRequest)
    model, chat, _ = await _read_chat(request, body, stored_responses(state_of(request)), context_of(request).tenant)
    prompt = await make_prompt(model, chat, ChatPlan(model, chat))
    return json_response(api.InputTokens(len(prompt["prompt_token_ids"])))


async def retrieve(request: Request) -> ASGIApp:
    """The current state of a response, or the rest of its stream."""
    found, background = await _find(request)
    if _choice(request, "stream", "false", "true") == "true":
        if background is None or not background.keeps_frames:
            raise invalid(
                "only recent responses created with 'background' and 'stream' can be streamed again", "stream"
            )
        return await _stream(request, background.frames(_int(request, "starting_after", -1)))
    return json_response(background.run.builder.response) if background is not None else _raw(found)


async def cancel(request: Request) -> ASGIApp:
    """Cancel a response that runs in the background; a finished one is returned unchanged."""
    found, background = await _find(request)
    if background is not None:
        await background.cancel("cancelled")
        return json_response(background.run.builder.response)
    if not msgspec.json.decode(found.response, type=api.Response).background:
        raise invalid(
            "only responses created with 'background' can be cancelled; to abort another one, close its connection"
        )
    return _raw(found)


async def delete(request: Request) -> ASGIApp:
    """Delete a response, and cancel it if it runs in the background."""
    found, background = await _find(request)
    if background is not None:
        await background.cancel("cancelled")
        background.keeps_frames = False
        stored_responses(state_of(request)).forget(background)
    await stored(stored_responses(state_of(request)).store.delete(context_of(request).tenant, found.id))
    return json_response(api.DeletedResponse(found.id))


async def input_items(request: Request) -> ASGIApp:
    """The input items of a response, the last one first by default."""
    found, _ = await _find(request)
    items: list[dict[str, Any]] = msgspec.json.decode(found.input_items)
    if _choice(request, "order", "desc", "asc") == "desc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid(f"after: no item of this response has the id {after[:100]!r}", "after")
        items = items[places[0] + 1 :]
    limit = _int(request, "limit", 20)
    if not 1 <= limit <= MAX_LISTED:
        raise invalid(f"limit={limit}: must be 1 to {MAX_LISTED}", "limit")
    page = items[:limit]
    ids = [item["id"] for item in page] or [None]
    return json_response(api.ItemList(page, ids[0], ids[-1], has_more=len(items) > limit))


async def _make_run(request: Request, body: api.ResponsesRequest, responses: StoredResponses, owner: str) -> Run:
    model, chat, encoded = await _read_chat(request, body, responses, owner)
    chat.stream = bool(body.stream or body.background)
    response = _new_response(model, body, context_of(request).model)

    async def keep(run: Run, is_new: bool) -> None:
        now = run.builder.response
        raw = msgspec.json.encode(now)
        row = StoredResponse(now.id, now.previous_response_id, now.status == "in_progress", raw, encoded)
        await stored(responses.store.add(owner, row) if is_new else responses.store.update(owner, row))

    async def count_tokens(text: str) -> int:
        return len(await model.llm.tokenize(text, False))

    return Run(
        ResponseBuilder(response, item_ids(response.id)),
        run_chat(model, chat, response.id, request),
        to_api_error=context_of(request).api_error,
        abort_error=context_of(request).abort_error,
        count_tokens=count_tokens,
        keep=keep if response.store else None,
    )


async def _read_chat(
    request: Request, body: api.ResponsesRequest, responses: StoredResponses, owner: str
) -> tuple[ServedModel, ChatCompletionRequest, bytes]:
    """The model, the chat request with the same meaning, and the request's own items as JSON, as they are stored."""
    args = state_of(request).args
    max_body, stores = args.max_body, args.response_store_max > 0
    model = await use_model(request, body.model)
    check_request(body, stores=stores)  # its errors have the body's own names, such as `prompt`
    body.store = stores and body.store is not False
    context_of(request).field_names |= _FIELD_NAMES
    earlier = await _history(responses, owner, body.previous_response_id, max_body)
    if not isinstance(body.input, str):
        body.input = await read_references(body.input, responses.store, owner, max_body)

    def read() -> tuple[ChatCompletionRequest, bytes]:
        own = own_items(body)
        return msgspec.convert(chat_request(body, earlier + own), ChatCompletionRequest), msgspec.json.encode(own)

    is_quick = len(body.input) + len(earlier) <= _QUICK_ITEMS or isinstance(body.input, str)
    chat, encoded = read() if is_quick else await asyncio.to_thread(read)
    return model, chat, encoded


async def _history(
    responses: StoredResponses, owner: str, previous_id: str | None, max_bytes: int
) -> list[dict[str, Any]]:
    """The items of the conversation up to a response, without truncated calls, which cannot have results."""
    if previous_id is None:
        return []
    try:
        if not is_response_id(previous_id):
            raise KeyError(previous_id)
        chain = await stored(responses.store.chain(owner, previous_id, max_bytes))
    except KeyError as error:
        missing = str(error.args[0])
        message = f"previous_response_id: no response {missing[:100]!r} was found; it may have been deleted"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found") from None
    items: list[dict[str, Any]] = []
    for link in chain:
        if link.running:
            raise invalid(f"previous_response_id: {link.id!r} is still in progress", "previous_response_id")
        output = msgspec.json.decode(link.response)["output"]
        items += msgspec.json.decode(link.input_items)
        items += [item for item in output if item["type"] != "function_call" or item["status"] == "completed"]
    return items


def _new_response(model: ServedModel, body: api.ResponsesRequest, name: str) -> api.Response:
    defaults = model.llm.default_sampling_params()
    return api.Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=name,
        store=bool(body.store),
        background=bool(body.background),
        tools=body.tools or [],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=body.text or api.TextConfig(),
        reasoning=body.reasoning or api.Reasoning(),
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_logprobs=body.top_logprobs or 0,
        metadata=body.metadata or {},
        **{name: getattr(body, name) for name in _SAME_NAMES},
    )


async def _stream(request: Request, frames: AsyncGenerator[bytes, None]) -> ASGIApp:
    return await event_stream(request, frames, error_event=_error_frame)


def _error_frame(error: ApiError) -> bytes:
    return event_frame({"type": "error", "code": error.code, "message": str(error), "param": error.param})


async def _find(request: Request) -> tuple[StoredResponse, BackgroundRun | None]:
    """The response that the path names, and its run in the background if there is one. Raises ApiError 404."""
    response_id, owner = request.path_params["response_id"], context_of(request).tenant
    responses, found = stored_responses(state_of(request)), None
    if is_response_id(response_id):
        found = await stored(responses.store.get(owner, response_id))
    if found is None:
        message = (
            f"no response {response_id[:100]!r} was found; it may have been deleted, or created with another API key"
        )
        raise ApiError(404, message, param="response_id", code="response_not_found")
    return found, responses.background(owner, found.id)


def _raw(found: StoredResponse) -> Response:
    return Response(found.response, media_type="application/json")


def _choice(request: Request, name: str, *allowed: str) -> str:
    """The value of a query parameter; the first allowed value is the default."""
    found = request.query_params.get(name, allowed[0]).lower()
    if found not in allowed:
        raise invalid(f"{name}={found[:100]!r}: must be one of {', '.join(allowed)}", name)
    return found


def _int(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if len(text) > 18 or not text.isascii() or not text.isdigit():
        raise invalid(f"{name}={text[:100]!r}: must be an integer, at least 0", name)
    return int(text)


_RESPONSE = "/v1/responses/{response_id}"
ENDPOINTS = (
    Endpoint(
        "/v1/responses", "POST", create, "Create a response",
        request=api.ResponsesRequest, response=api.Response, chunk=dict[str, Any], generates=True,
    ),
    Endpoint(
        "/v1/responses/input_tokens", "POST", count_input_tokens, "Count the tokens of a response's prompt",
        request=api.ResponsesRequest, response=api.InputTokens,
    ),
    Endpoint(_RESPONSE, "GET", retrieve, "Retrieve a stored response", response=api.Response, chunk=dict[str, Any]),
    Endpoint(_RESPONSE, "DELETE", delete, "Delete a stored response", response=api.DeletedResponse),
    Endpoint(
        f"{_RESPONSE}/cancel", "POST", cancel, "Cancel a response that runs in the background", response=api.Response
    ),
    Endpoint(
        f"{_RESPONSE}/input_items", "GET", input_items, "List the input items of a response", response=api.ItemList
    ),
)  # fmt: skip
