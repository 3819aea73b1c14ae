"""GET /debug/cache/events: the cache and the queues as they change, for the page and for `quire top`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.view.cache_frame import CacheUpdate
from quire.server.http import sse
from quire.server.http.endpoint import Endpoint
from quire.server.http.errors import ApiError
from quire.server.http.state import ServerState, state_of

MAX_WATCHERS = 16


async def cache_events(request: Request) -> ASGIApp:
    """A stream of CacheUpdates: first a snapshot, then changes. A watcher that is too slow gets a new snapshot when it
    reads again. Raises ApiError (429) for one watcher too many."""
    state = state_of(request)
    if state.num_cache_watchers >= MAX_WATCHERS:
        message = f"too many open streams of the cache: at most {MAX_WATCHERS} are allowed"
        raise ApiError(429, message, code="too_many_watchers", headers={"retry-after": "5"})
    return await sse.event_stream(
        request, _events(state), error_event=lambda error: sse.frame(error.to_json(request.url.path))
    )


async def _events(state: ServerState) -> AsyncGenerator[bytes, None]:
    state.num_cache_watchers += 1
    try:
        while True:  # the engine's interface ends the frames of a watcher that is too slow
            async with aclosing(state.llm.watch_cache()) as frames:
                async for data in frames:
                    yield sse.frame(data)
    finally:
        state.num_cache_watchers -= 1


ENDPOINTS = (
    Endpoint(
        "/debug/cache/events", "GET", cache_events, "Watch the cache and the queues",
        chunk=CacheUpdate, media_type="text/event-stream",
    ),
)  # fmt: skip
