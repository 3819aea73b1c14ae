"""The requests that run: what the engine sends reaches them here, and what a dead engine leaves goes to the next."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from quire.common.errors import (
    EngineDeadError,
    InvalidParamsError,
    QuireError,
    RequestError,
    error_named,
    failures_named,
)
from quire.common.log import logger
from quire.common.outputs import EngineStats
from quire.engine.process.messages import Abort, CacheFrame, ProtocolError, Ready, RequestDelta, StepDone
from quire.engine.requests.input_processor import CheckedRequest, InputProcessor
from quire.interfaces.async_llm.engine_message import Params, engine_message
from quire.interfaces.async_llm.listener import RequestListener
from quire.interfaces.async_llm.output_processor import RequestState
from quire.interfaces.async_llm.supervisor import Supervisor

MAX_DEATHS = 2
"""of engines that a request may have been with: it may be what they died of, and is not given to another"""


class RequestTable:
    """Owns the requests from when they are found right to their end. For one event loop."""

    def __init__(self, engine: Supervisor, inputs: InputProcessor, stats: EngineStats, *, holds: bool) -> None:
        """`holds`: requests that come while there is no engine wait for the next one."""
        self.stats = stats
        """the engine after its latest step"""
        self._engine = engine
        self._inputs = inputs
        self._holds = holds
        self._requests: dict[int, RequestState] = {}  # by key, in order of arrival
        self._request_ids: set[str] = set()
        self._num_keys = self._num_seeds = 0
        self.listeners: list[RequestListener] = []
        self.num_replayed = 0

    def add(self, checked: CheckedRequest, params: Params | None = None) -> RequestState:
        """Send a request to the engine; without `params` it is only scored. Raises RequestError or EngineDeadError, and
        sends nothing.

        Where the params have no seed they get one here, so that any engine draws the same tokens.
        """
        request_id = checked.outputs.request_id
        if request_id in self._request_ids:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        key, self._num_keys = self._num_keys, self._num_keys + 1
        try:
            message = engine_message(key, checked, params, self._inputs.seed(self._num_seeds))
            if self._engine.death is None or self._engine.is_lost or not self._holds:
                self._engine.send(message)
        except (OverflowError, TypeError, UnicodeError, ProtocolError) as error:
            raise InvalidParamsError(f"the request cannot be sent to the engine: {error}") from error
        self._num_seeds += params is not None
        request = self._requests[key] = RequestState(message, checked.outputs, checked.sample)
        self._request_ids.add(request_id)
        self.tell("on_request_start", request_id, len(message.token_ids), params or checked.outputs.params)
        return request

    def abort(self, request_id: str) -> None:
        """Abort the request of this id, if there is one."""
        for request in [request for request in self._requests.values() if request.message.request_id == request_id]:
            self.leave(request)

    def leave(self, request: RequestState) -> None:
        """Abort a request, if it has not ended."""
        if request.message.key in self._requests:
            request.abort()
            self._end(request, is_running=True)

    def on_message(self, message: StepDone | CacheFrame) -> None:
        """What a step has changed."""
        if not isinstance(message, StepDone):
            return
        self.stats, now = message.stats, time.monotonic()
        for delta in message.deltas:
            request = self._requests.get(delta.key)
            if request is None:  # aborted meanwhile
                continue
            try:
                with failures_named(request.message.request_id, "when its output was made"):
                    self._update(request, delta, now)
            except QuireError as error:
                logger.error("%s", error, exc_info=error)
                request.fail(error)
                self.leave(request)
        self.tell("on_step", message.stats)

    def on_death(self, error: EngineDeadError) -> None:
        """End those that have been with too many engines; the others wait."""
        num_running = len(self._requests)
        for request in list(self._requests.values()):
            request.num_deaths += 1
            if request.num_deaths >= MAX_DEATHS:
                self._fail(request, error)
        num_waiting = len(self._requests)
        logger.error("%d requests wait for another engine, %d ended", num_waiting, num_running - num_waiting)
        gone: dict[str, Any] = dict.fromkeys(("num_running", "num_swapped", "num_used_blocks", "num_cached_blocks"), 0)
        self.stats = replace(self.stats, num_waiting=num_waiting, num_pinned_blocks=0, **gone)

    def on_restart(self, ready: Ready) -> None:
        """Give all to the new engine, in the order in which they came."""
        self.stats = ready.stats
        for request in self._requests.values():
            self._engine.send(request.replay())
        self.num_replayed += len(self._requests)

    def on_loss(self, error: EngineDeadError) -> None:
        """End all."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    def tell(self, event: str, *args: Any) -> None:
        """The listeners. One that raises, which it must not, is no reason to give up a request."""
        for listener in self.listeners:
            try:
                getattr(listener, event)(*args)
            except Exception:
                logger.exception("a listener could not be told: %s", event)

    def _update(self, request: RequestState, delta: RequestDelta, now: float) -> None:
        if delta.error_kind is not None:
            self._fail(request, error_named(delta.error_kind, delta.error or ""))
            return
        num_tokens = request.update(delta)
        if num_tokens:
            self.tell("on_tokens", request.message.request_id, num_tokens, now)
        if request.is_finished:
            self._end(request, is_running=not delta.finished)

    def _fail(self, request: RequestState, error: QuireError) -> None:
        request.fail(error)
        self._end(request, is_running=False)

    def _end(self, request: RequestState, *, is_running: bool) -> None:
        """Forget a request; where it still runs in the engine, end it there."""
        del self._requests[request.message.key]
        request_id, outputs = request.message.request_id, request.outputs
        self._request_ids.discard(request_id)
        if is_running and self._engine.death is None:
            self._engine.send(Abort(request_id))
        self.tell("on_request_end", request_id, outputs.metrics, outputs.num_cached_tokens, request.finish_reason)
