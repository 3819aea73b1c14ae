"""The requests of one engine. It passes them the engine's messages, and sends them to a new engine if it dies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.common.errors import EngineDeadError, QuireError, error_named, failures_named
from quire.common.log import logger
from quire.common.outputs import EngineStats
from quire.engine.process.messages import (
    Abort,
    AddAny,
    AddMany,
    AddPooling,
    Event,
    PrefixReport,
    Ready,
    RequestDelta,
    StepDone,
)
from quire.interfaces.async_llm.output_processor import RequestState
from quire.interfaces.async_llm.supervisor import Supervisor

if TYPE_CHECKING:
    from quire.interfaces.async_llm.dispatcher import Dispatcher

MAX_DEATHS = 2
"""A request that was running when this number of engines died, one after another, may be the cause, and is not sent to
another one."""
MIN_PROGRESS = 16
"""A request that got this number of tokens from an engine is not taken to be the cause of the deaths before."""


class RequestTable:
    """Owns the requests that an engine runs, until they end or move to another engine. Used in one event loop."""

    def __init__(self, number: int, engine: Supervisor, stats: EngineStats, dispatcher: Dispatcher) -> None:
        self.number = number
        """The engine's number, from 0."""
        self.engine = engine
        self.stats = stats
        """Statistics of the engine after its latest step."""
        self.requests: dict[int, RequestState] = {}
        """By key, in order of arrival."""
        self.num_replayed = 0
        """Requests that this engine has continued."""
        self._dispatcher = dispatcher

    @property
    def is_running(self) -> bool:
        """Whether the engine runs."""
        return self.engine.death is None

    def hold(self, request: RequestState) -> None:
        """Own a request, which is sent when the engine runs again, or was sent already."""
        self.requests[request.message.key] = request
        request.table = self

    def replay(self, request: RequestState) -> None:
        """Own a request that another engine has begun, and continue it."""
        self.engine.send(request.replay())
        self.hold(request)
        self.num_replayed += 1
        self._dispatcher.begin_route(request, self)

    def release(self, request: RequestState) -> None:
        """No longer own a request, which moves to another engine."""
        del self.requests[request.message.key]
        self._dispatcher.end_route(request)

    def send(self, added: Sequence[AddAny]) -> None:
        """Send requests to the engine; several pooling requests are one message. Raises EngineDeadError and what
        `to_frame` raises."""
        pooling = [message for message in added if isinstance(message, AddPooling)]
        if len(pooling) > 1:
            self.engine.send(AddMany(pooling))
            return
        for message in added:
            self.engine.send(message)

    def abort(self, requests: Iterable[RequestState]) -> None:
        """Abort those of the requests that have not ended."""
        running = [request for request in requests if request.message.key in self.requests]
        for request in running:
            request.abort()
            self._end(request)
        self._abort_in_engine(running)

    def on_message(self, message: Event) -> None:
        """Apply the deltas of a step to their requests."""
        if isinstance(message, PrefixReport):
            self._dispatcher.on_report(self, message)
        if not isinstance(message, StepDone):
            return
        self.stats, now = message.stats, time.monotonic()
        for delta in message.deltas:
            request = self.requests.get(delta.key)
            if request is None:  # aborted meanwhile, or moved to another engine
                continue
            try:
                with failures_named(request.message.request_id, "when its output was made"):
                    self._update(request, delta, now)
            except QuireError as error:
                logger.error("%s", error, exc_info=error)
                request.fail(error)
                self.abort([request])
        self._dispatcher.notify_step()

    def on_death(self, error: EngineDeadError) -> None:
        """End requests that were running in too many engines that died. The others continue in another engine, or wait
        for the next one."""
        num_running = len(self.requests)
        for request in list(self.requests.values()):
            if not self.engine.is_restarting:
                request.count_death(MIN_PROGRESS)
            self._dispatcher.end_route(request)
            if request.num_deaths >= MAX_DEATHS:
                self._fail(request, error)
        num_left = len(self.requests)
        num_moved = self._dispatcher.on_death(self)
        num_waiting, num_failed = num_left - num_moved, num_running - num_left
        logger.warning("%d requests wait for another engine, %d moved, %d failed", num_waiting, num_moved, num_failed)
        gone: dict[str, Any] = dict.fromkeys(("num_running", "num_swapped", "num_used_blocks", "num_cached_blocks"), 0)
        self.stats = replace(self.stats, num_waiting=num_waiting, num_pinned_blocks=0, **gone)

    def on_restart(self, ready: Ready) -> None:
        """Send all requests that wait to the new engine, in order of arrival."""
        self.stats = ready.stats
        self._dispatcher.on_restart(self)

    def on_loss(self, error: EngineDeadError) -> None:
        """End the requests that wait for this engine, unless they can wait for another one."""
        if not self._dispatcher.on_loss(self):
            for request in list(self.requests.values()):
                self._fail(request, error)

    def _update(self, request: RequestState, delta: RequestDelta, now: float) -> None:
        if delta.error_kind is not None:
            self._fail(request, error_named(delta.error_kind, delta.error or ""))
            return
        num_tokens = request.update(delta)
        if num_tokens:
            self._dispatcher.on_tokens(request, num_tokens, now)
        if request.is_finished:
            self._end(request)
            self._abort_in_engine([] if delta.finished else [request])

    def _fail(self, request: RequestState, error: QuireError) -> None:
        request.fail(error)
        self._end(request)

    def _abort_in_engine(self, requests: Sequence[RequestState]) -> None:
        if requests and self.is_running:
            self.engine.send(Abort([request.message.request_id for request in requests]))

    def _end(self, request: RequestState) -> None:
        """Remove a request."""
        self.release(request)
        self._dispatcher.on_end(request)
