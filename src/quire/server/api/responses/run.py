"""A response that is being generated, for its client or in the background; and all stored responses."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.common.log import logger
from quire.config.machine import parse_bytes
from quire.server.api.chat.events import ChatEvent
from quire.server.api.responses.protocol import Response, ResponseError, Status
from quire.server.api.responses.store import ChainTooLongError, ResponseStore, ResponseTooLargeError, StoreError
from quire.server.api.responses.stream import Event, ResponseBuilder
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError
from quire.server.http.sse import event_frame

T = TypeVar("T")
CHECK_S = 0.5
"""Time to wait for a chat's first event, so that an invalid request fails before a response is sent or stored."""
MAX_BACKGROUND = 256
"""Maximum number of responses that run in the background."""
MAX_KEPT_STREAMS = 32
"""Maximum number of finished background streams that can still be read."""


class Run:
    """Owns one chat. `begin`, then read `events` to their end or close them: closing cancels the response."""

    def __init__(
        self,
        builder: ResponseBuilder,
        chat: AsyncGenerator[ChatEvent, None],
        *,
        to_api_error: Callable[[Exception], ApiError],
        abort_error: Callable[[], ApiError | None],
        count_tokens: Callable[[str], Awaitable[int]],
        keep: Callable[["Run", bool], Awaitable[None]] | None,
    ) -> None:
        """`abort_error` returns the error with which the server aborts it, if it does. `keep(run, is_new)` stores the
        current state; None: nothing is stored."""
        self.builder = builder
        self.error: ApiError | None = None
        """The error, if the response failed."""
        self._chat = chat
        self._to_api_error = to_api_error
        self._abort_error = abort_error
        self._count_tokens = count_tokens
        self._keep = keep
        self._first: asyncio.Task[ChatEvent | None] | None = None
        self._ending: tuple[Status, ResponseError | None] | None = None

    async def begin(self) -> None:
        """Start the chat and store the response. Raises ApiError for an invalid request, and then stores nothing."""
        self._first = asyncio.create_task(_next(self._chat))
        is_kept = False
        try:
            await asyncio.wait({self._first}, timeout=CHECK_S)
            if self._first.done():
                self._first.result()
            if self._keep is not None:
                is_kept = True
                await self._keep(self, True)
        except BaseException as error:
            await self._close_chat()
            if is_kept:  # cancelled while it was being stored
                self._end_early()
                await self._store_end()
            if isinstance(error, Exception):
                raise self._to_api_error(error) from error
            raise

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of the stream. An error becomes a failed response, also one with which the server cancels the task
        that reads them. The last event is sent after the response was stored; closing the generator before that cancels
        the response."""
        builder = self.builder
        try:
            for event in builder.start():
                yield event
            assert self._first is not None
            chat_event = await self._first
            while chat_event is not None:
                for event in builder.feed(chat_event):
                    yield event
                chat_event = await _next(self._chat)
            reasoning = builder.reasoning_text
            for event in builder.complete(int(time.time()), await self._count_tokens(reasoning) if reasoning else 0):
                yield event
        except Exception as error:
            for event in self._fail(self._to_api_error(error)):
                yield event
        except asyncio.CancelledError:
            if self._ending is None and self._abort_error() is None:  # the client has disconnected
                raise
            for event in self._end_early():
                yield event
        finally:
            if builder.response.status == "in_progress":
                self._end_early()
            await self._close_chat()
            await self._store_end()
        yield builder.last()

    def _fail(self, error: ApiError) -> list[Event]:
        self.error = error
        return self.builder.end("failed", ResponseError(error.code or "server_error", str(error)))

    def _end_early(self) -> list[Event]:
        """End as `end_as` said, or with the server's error; without either the client has left."""
        error = self._abort_error()
        if self._ending is None and error is not None:
            return self._fail(error)
        return self.builder.end(*(self._ending or ("cancelled", None)))

    def end_as(self, status: Status, error: ResponseError | None) -> None:
        """From now on, cancelling the task that reads the events ends them with this status."""
        self._ending = status, error

    async def _store_end(self) -> None:
        if self._keep is None:
            return
        try:
            await self._keep(self, False)
        except ApiError as error:
            self._fail(error)

    async def _close_chat(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._chat.aclose()


class BackgroundRun:
    """Reads a run to its end in its own task, and keeps the frames of its stream if they can be requested later."""

    def __init__(self, run: Run, owner: str, keeps_frames: bool) -> None:
        self.run = run
        self.owner = owner
        self.keeps_frames = keeps_frames
        self.task: asyncio.Task[None]
        """Drives it; set by StoredResponses."""
        self._frames: list[bytes] = []
        self.is_over = False
        self._changed = asyncio.Event()

    async def drive(self) -> None:
        """Read all events."""
        try:
            async with aclosing(self.run.events()) as events:
                async for event in events:
                    if self.keeps_frames:
                        self._frames.append(event_frame(event))
                        self._notify()
        finally:
            self.is_over = True
            self._notify()

    async def frames(self, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """The stream's events after this number, including future ones. Closing the generator does not end the run."""
        position = starting_after + 1
        while True:
            changed = self._changed
            for framed in self._frames[position:]:
                yield framed
                position += 1
            if position >= len(self._frames):
                if self.is_over:
                    return
                await changed.wait()

    def stop(self, status: Status, error: ResponseError | None = None) -> None:
        """End it with this status, soon. Does nothing if it has ended."""
        if not self.task.done():
            self.run.end_as(status, error)
            self.task.cancel()

    async def cancel(self, status: Status, error: ResponseError | None = None) -> None:
        """End it with this status, and wait until it is stored."""
        self.stop(status, error)
        await asyncio.wait({self.task})

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class StoredResponses:
    """Owns the store and the background responses: everything that `/v1/responses` keeps between requests."""

    def __init__(self, args: ServerArgs) -> None:
        """Open the store. Raises ConfigError."""
        self.store = ResponseStore(
            Path(args.response_store) if args.response_store is not None else None,
            max_responses=args.response_store_max,
            max_bytes=parse_bytes("response_store_max_bytes", args.response_store_max_bytes),
            fail=_failed_json,
        )
        self._timeout_s = args.request_timeout_s
        self._max_per_owner = args.max_concurrent_per_tenant or MAX_BACKGROUND
        self._background: dict[str, BackgroundRun] = {}
        """Running responses, and the last finished ones whose streams can still be read."""
        self._beginning: list[str] = []
        """The owners of those that are about to run in the background."""

    def start(self, run: Run, owner: str, keeps_frames: bool) -> BackgroundRun:
        """Run it in the background."""
        background = self._background[run.builder.response.id] = BackgroundRun(run, owner, keeps_frames)
        background.task = asyncio.create_task(self._drive(background))
        return background

    @contextlib.contextmanager
    def beginning(self, owner: str) -> Iterator[None]:
        """In the block, a response of this owner begins that is to run in the background; it counts as running already.
        Raises ApiError 429 if no more may run, in all or for this owner."""
        running = [*self._beginning, *[each.owner for each in self._background.values() if not each.is_over]]
        if len(running) >= MAX_BACKGROUND or running.count(owner) >= self._max_per_owner:
            message = f"{len(running)} responses are running in the background, and the limit is reached"
            raise ApiError(429, message, headers={"retry-after": "10"})
        self._beginning.append(owner)
        try:
            yield
        finally:
            self._beginning.remove(owner)

    def background(self, owner: str, response_id: str) -> BackgroundRun | None:
        """A response that runs in the background, or did recently; None for another owner's."""
        found = self._background.get(response_id)
        return found if found is not None and found.owner == owner else None

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` for background responses, end the rest, and close the store. Cancelling this call once
        ends only the waiting."""
        running = [each for each in self._background.values() if not each.is_over]
        if running and drain_s > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({each.task for each in running}, timeout=drain_s)
        error = ResponseError("server_error", "the server was shut down")
        await asyncio.gather(*(each.cancel("failed", error) for each in running))
        self.store.close()

    async def _drive(self, background: BackgroundRun) -> None:
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.forget, background)
            if self._timeout_s is not None:
                error = ResponseError("request_timeout", f"the response was not complete within {self._timeout_s} s")
                timer = asyncio.get_running_loop().call_later(self._timeout_s, background.stop, "failed", error)
                at_end.callback(timer.cancel)
            await background.drive()

    def forget(self, background: BackgroundRun) -> None:
        """Drop a response whose stream cannot be read, and the oldest ones beyond MAX_KEPT_STREAMS."""
        if not background.keeps_frames:
            self._background.pop(background.run.builder.response.id, None)
        ended = [key for key, each in self._background.items() if each.is_over]
        for key in ended[:-MAX_KEPT_STREAMS]:
            del self._background[key]


async def stored(call: Awaitable[T]) -> T:
    """The result of a call of the store; its errors become ApiError."""
    try:
        return await call
    except ResponseTooLargeError as error:
        raise ApiError(413, str(error), param="store") from error
    except ChainTooLongError as error:
        raise ApiError(400, str(error), param="previous_response_id") from error
    except StoreError as error:
        logger.error("%s", error)
        raise ApiError(500, str(error), code="store_unavailable") from error


def _failed_json(response: bytes, reason: str) -> bytes:
    """The JSON of a stored response that ended early, marked as failed."""
    found = msgspec.json.decode(response, type=Response)
    found.status = "failed"
    found.error = ResponseError("server_error", reason)
    return msgspec.json.encode(found)


async def _next(chat: AsyncGenerator[ChatEvent, None]) -> ChatEvent | None:
    return await anext(chat, None)
