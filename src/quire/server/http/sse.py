"""Server-sent events: framing, keep-alive comments, and closing when the client disconnects.

(HTML standard, section 9.2.) When the client disconnects, its stream is closed, which aborts its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from quire.server.http.errors import OLLAMA_PATH, ApiError
from quire.server.http.state import CLIENT_CLOSED_REQUEST, context_of, state_of

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PEEK_S = 1.0
"""Time to wait for the first event before the status is sent: an earlier error determines the status."""
EVENTS, NDJSON = b"text/event-stream; charset=utf-8", b"application/x-ndjson"
"""Media types of streams: server-sent events, or lines of JSON."""
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
)


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. The data is one line, as JSON is."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def json_line(body: object) -> bytes:
    """A line of JSON."""
    return msgspec.json.encode(body) + b"\n"


def error_line(error: ApiError) -> bytes:
    """The last line of a failed stream of Ollama's."""
    return error.to_json(OLLAMA_PATH) + b"\n"


def event_frame(event: Mapping[str, Any]) -> bytes:
    """One event as JSON, named by its `type`."""
    return frame(msgspec.json.encode(event), event["type"])


async def framed(events: AsyncGenerator[T, None], to_frame: Callable[[T], bytes], end: bytes = b"") -> Events:
    """The frames of `events`, then `end`. Closing the generator closes `events`."""
    async with aclosing(events):
        async for event in events:
            yield to_frame(event)
    if end:
        yield end


async def read_all(events: AsyncGenerator[object, None]) -> None:
    """Read `events` to their end, for a response that is not streamed, and close them."""
    async with aclosing(events):
        async for _ in events:
            pass


def openai_error(error: ApiError) -> bytes:
    """The last events of a failed stream."""
    return frame(error.to_json("")) + DONE


async def event_stream(
    request: Request,
    events: Events,
    *,
    error_event: Callable[[ApiError], bytes],
    keep_alive: bytes = KEEP_ALIVE,
    kind: bytes = EVENTS,
) -> EventStream:
    """Return the response that sends `events`, which are already framed, as this media type. `keep_alive` is sent while
    there are none; empty: nothing is.

    An exception that they raise within PEEK_S, before the first event, is raised here; a later one becomes the last
    event, made by `error_event`. The events are closed when the response ends for any reason, and when the client
    disconnects before it begins.
    """
    context = context_of(request)
    keep_alive_s = state_of(request).args.keep_alive_s
    stream = EventStream(events, lambda error: error_event(context.api_error(error)), keep_alive, keep_alive_s, kind)
    try:
        await unless_disconnected(request, stream.peek())
    except Exception as error:
        raise context.api_error(error) from error
    return stream


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects. Raises ApiError (499) then."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client disconnected")
        return task.result()
    finally:
        await _cancel(task, watch)


class EventStream:
    """A streamed response, as an ASGI application. Its first event can be awaited before the status is sent."""

    def __init__(
        self,
        events: Events,
        to_event: Callable[[Exception], bytes],
        keep_alive: bytes,
        keep_alive_s: float,
        kind: bytes = EVENTS,
    ) -> None:
        """`to_event` makes the last event of an exception that `events` raises, or of the server's abort."""
        self._events = events
        self._to_event = to_event
        self._first: asyncio.Task[bytes | None] | None = None
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._kind = kind
        self._last_sent_s = 0.0
        self._is_complete = False

    async def peek(self) -> None:
        """Wait up to PEEK_S for the first event. If it raises, close the events and raise the same exception."""
        self._first = asyncio.create_task(self._next())
        try:
            await asyncio.wait({self._first}, timeout=PEEK_S)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, until the client disconnects or the server aborts the request: that error is the end, which
        `events` may write themselves when they are cancelled."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", self._kind), *_HEADERS]}
            )
            if scope["method"] == "HEAD":  # there is nothing to wait for
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            pump = asyncio.create_task(self._pump(send))
            watch = asyncio.create_task(_disconnected(receive))
            tasks = [pump, watch]
            if self._keep_alive:
                tasks.append(asyncio.create_task(self._keep_alives(send)))
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        except asyncio.CancelledError:
            error = context_of(scope).abort_error()
            if error is not None:
                await _cancel(*tasks)
                await self._close()
                if not self._is_complete:
                    await send({"type": "http.response.body", "body": self._to_event(error), "more_body": False})
            raise
        finally:
            await _cancel(*tasks)
            await self._close()

    async def _close(self) -> None:
        """Close the events, also if reading has not begun."""
        if self._first is not None:
            await _cancel(self._first)
        await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        """Send events. It waits for a client that reads slowly; the engine's interface merges outputs meanwhile."""
        clock = asyncio.get_running_loop().time
        async for event in self._all():
            self._last_sent_s = clock()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._is_complete = True

    async def _all(self) -> Events:
        try:
            event = await (self._next() if self._first is None else self._first)
            while event is not None:
                yield event
                event = await self._next()
        except Exception as error:
            yield self._to_event(error)

    async def _next(self) -> bytes | None:
        return await anext(self._events, None)

    async def _keep_alives(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for a while, so that proxies keep the connection open."""
        clock = asyncio.get_running_loop().time
        self._last_sent_s = clock()
        while True:
            left_s = self._last_sent_s + self._keep_alive_s - clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                self._last_sent_s = clock()
                await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
