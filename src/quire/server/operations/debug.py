"""GET /debug/cache/...: the cache and the queues as they change, and blocks' tokens, for the page and `quire top`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.view.cache_frame import CacheUpdate
from quire.server.http import sse
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import ApiError, invalid
from quire.server.http.state import ServerState, context_of, state_of

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM

MAX_WATCHERS = 16
MAX_BLOCKS_READ = 64
_TIERS = ("device", "host")


class BlockTokens(msgspec.Struct):
    """The computed tokens in one block; none if it is free."""

    id: int
    token_ids: list[int]
    texts: list[str]


class BlocksRead(msgspec.Struct):
    """The answer of /debug/cache/blocks, in the order of the request."""

    blocks: list[BlockTokens]


async def cache_events(request: Request) -> ASGIApp:
    """A stream of CacheUpdates of the model that `?model=` names, of its engine `?engine=`: first a snapshot, then
    changes. A watcher that is too slow gets a new snapshot when it reads again. Raises ApiError (429) for one watcher
    too many."""
    state, llm = state_of(request), _loaded(request)
    engine = _engine(request, llm)
    if state.num_cache_watchers >= MAX_WATCHERS:
        message = f"too many open streams of the cache: at most {MAX_WATCHERS} are allowed"
        raise ApiError(429, message, code="too_many_watchers", headers={"retry-after": "5"})
    state.num_cache_watchers += 1  # at once: others may arrive before the first event
    context_of(request).at_end.callback(_leave, state)
    return await sse.event_stream(
        request, _events(llm, engine), error_event=lambda error: sse.frame(error.to_json(request.url.path))
    )


def _loaded(request: Request) -> AsyncLLM:
    """The model that `?model=` names, or the first one. Raises ApiError: 404 if it is unknown, 503 if not loaded."""
    entry = state_of(request).models.find(request.query_params.get("model"))
    if entry.llm is None:
        message = f"the model {entry.name!r} was not loaded yet, so it has no cache"
        raise ApiError(503, message, code="model_asleep", headers={"retry-after": "5"})
    return entry.llm


def _engine(request: Request, llm: AsyncLLM) -> int:
    """The number that `?engine=` gives, 0 by default. Raises ApiError (400) if the model has no such engine."""
    text, number = request.query_params.get("engine", "0"), len(llm.group.engines)
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and int(text) < number):
        allowed = "must be 0, since the model has one engine" if number == 1 else f"must be from 0 to {number - 1}"
        raise invalid(f"engine={text[:50]!r}: {allowed}", "engine")
    return int(text)


async def _events(llm: AsyncLLM, engine: int) -> AsyncGenerator[bytes, None]:
    while True:  # the engine's interface ends the frames of a watcher that is too slow
        async with aclosing(llm.watch_cache(engine)) as frames:
            async for data in frames:
                yield sse.frame(data)


def _leave(state: ServerState) -> None:
    state.num_cache_watchers -= 1


async def cache_blocks(request: Request) -> ASGIApp:
    """The tokens in the blocks `ids` of a `tier` of the model that `?model=` names, of its engine `?engine=`.

    Raises ApiError (403) where callers may have different keys.
    """
    state, query = state_of(request), request.query_params
    if not state.shows_tokens():
        message = (
            "tokens in the cache are shown only if all callers are one tenant: "
            "the server needs exactly one API key, or none and a local address"
        )
        raise ApiError(403, message, code="tokens_hidden")
    tier, ids = query.get("tier", "device"), query.get("ids", "").split(",")[: MAX_BLOCKS_READ + 1]
    if tier not in _TIERS:
        raise invalid(f"tier is {tier[:50]!r}; allowed: {', '.join(_TIERS)}", "tier")
    if len(ids) > MAX_BLOCKS_READ or not all(i.isascii() and i.isdecimal() and len(i) < 10 for i in ids):
        raise invalid(f"ids must be 1 to {MAX_BLOCKS_READ} numbers of blocks, separated by commas", "ids")
    block_ids = [int(i) for i in ids]
    llm = _loaded(request)
    tokens = await llm.block_tokens(_TIERS.index(tier), block_ids, _engine(request, llm))
    decode = llm.tokenizer.decode_token
    rows = zip(block_ids, tokens, strict=True)
    return json_response(BlocksRead([BlockTokens(i, row, [decode(token) for token in row]) for i, row in rows]))


ENDPOINTS = (
    Endpoint(
        "/debug/cache/blocks", "GET", cache_blocks, "Read the tokens in blocks of the cache", response=BlocksRead
    ),
    Endpoint(
        "/debug/cache/events", "GET", cache_events, "Watch the cache and the queues",
        chunk=CacheUpdate, media_type="text/event-stream",
    ),
)  # fmt: skip
