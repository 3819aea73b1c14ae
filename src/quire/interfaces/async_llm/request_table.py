"""The table of running requests. It passes them the engine's messages, and sends them to a new engine if one dies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
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
from quire.common.params import PoolingParams
from quire.engine.process.messages import (
    Abort,
    AddAny,
    AddMany,
    AddPooling,
    Event,
    ProtocolError,
    Ready,
    RequestDelta,
    StepDone,
)
from quire.engine.requests.input_processor import CheckedRequest, InputProcessor
from quire.interfaces.async_llm.engine_message import AnyParams, engine_message
from quire.interfaces.async_llm.listener import RequestListener
from quire.interfaces.async_llm.output_processor import RequestState
from quire.interfaces.async_llm.supervisor import Supervisor

MAX_DEATHS = 2
"""A request that was running when this number of engines died may be the cause, and is not sent to another one."""


class RequestTable:
    """Owns all valid requests until they end. It must be used in one event loop."""

    def __init__(self, engine: Supervisor, inputs: InputProcessor, stats: EngineStats, *, holds: bool) -> None:
        """If `holds`, requests that are added while no engine runs wait for the next one."""
        self.stats = stats
        """Statistics of the engine after its latest step."""
        self._engine = engine
        self._inputs = inputs
        self._holds = holds
        self._requests: dict[int, RequestState] = {}  # by key, in order of arrival
        self._request_ids: set[str] = set()
        self._num_keys = self._num_seeds = 0
        self.listeners: list[RequestListener] = []
        self.num_replayed = 0

    def add(self, checked: CheckedRequest, params: AnyParams | None = None) -> RequestState:
        """Send a request to the engine; without `params` it is only scored. Raises RequestError or EngineDeadError, and
        then sends nothing.

        Parameters without a seed get one here, so that every engine samples the same tokens for them.
        """
        return self.add_all([checked], params, asyncio.Event())[0]

    def add_all(
        self, checked: Sequence[CheckedRequest], params: AnyParams | None, changed: asyncio.Event
    ) -> list[RequestState]:
        """As `add`, for several requests whose caller awaits the same event. Pooling requests are one message."""
        first, self._num_keys = self._num_keys, self._num_keys + len(checked)
        seed = self._inputs.seed(self._num_seeds)
        request_ids = [each.outputs.request_id for each in checked]
        for request_id, count in Counter(request_ids).items():
            if count > 1 or request_id in self._request_ids:
                raise RequestError(f"request id {request_id!r} is in use by an unfinished request: choose another")
        try:
            added = [engine_message(key, each, params, seed) for key, each in enumerate(checked, first)]
            if self._engine.death is None or self._engine.is_lost or not self._holds:
                self._send(added)
        except (OverflowError, TypeError, UnicodeError, ProtocolError) as error:
            raise InvalidParamsError(f"the request cannot be sent to the engine: {error}") from error
        self._num_seeds += params is not None and not isinstance(params, PoolingParams)
        self._request_ids.update(request_ids)
        pairs = zip(added, checked, strict=True)
        made = [RequestState(message, each.outputs, each.sample, changed) for message, each in pairs]
        for request in made:
            self._requests[request.message.key] = request
            given = request.outputs.params if params is None or isinstance(params, PoolingParams) else params
            self._notify("on_request_start", request.message.request_id, len(request.message.token_ids), given)
        return made

    def _send(self, added: Sequence[AddAny]) -> None:
        pooling = [message for message in added if isinstance(message, AddPooling)]
        if len(pooling) > 1:
            self._engine.send(AddMany(pooling))
            return
        for message in added:
            self._engine.send(message)

    async def drain(self) -> None:
        """Wait until little is left to send, or no engine runs."""
        await self._engine.drain()

    def abort(self, request_id: str) -> None:
        """Abort the request with this id, if there is one."""
        for request in [request for request in self._requests.values() if request.message.request_id == request_id]:
            self.abort_requests([request])

    def abort_requests(self, requests: Iterable[RequestState]) -> None:
        """Abort those of the requests that have not ended."""
        running = [request for request in requests if request.message.key in self._requests]
        for request in running:
            request.abort()
            self._end(request)
        self._abort_in_engine(running)

    def on_message(self, message: Event) -> None:
        """Apply the deltas of a step to their requests."""
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
                self.abort_requests([request])
        self._notify("on_step", message.stats)

    def on_death(self, error: EngineDeadError) -> None:
        """End requests that were running in too many engines that died; the others wait for the next engine."""
        num_running = len(self._requests)
        for request in list(self._requests.values()):
            request.num_deaths += 1
            if request.num_deaths >= MAX_DEATHS:
                self._fail(request, error)
        num_waiting = len(self._requests)
        logger.error("%d requests wait for another engine, %d failed", num_waiting, num_running - num_waiting)
        gone: dict[str, Any] = dict.fromkeys(("num_running", "num_swapped", "num_used_blocks", "num_cached_blocks"), 0)
        self.stats = replace(self.stats, num_waiting=num_waiting, num_pinned_blocks=0, **gone)

    def on_restart(self, ready: Ready) -> None:
        """Send all requests to the new engine, in order of arrival."""
        self.stats = ready.stats
        for request in self._requests.values():
            self._engine.send(request.replay())
        self.num_replayed += len(self._requests)

    def on_loss(self, error: EngineDeadError) -> None:
        """End all requests with this error."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    def _notify(self, event: str, *args: Any) -> None:
        """Notify the listeners of an event. If one raises an exception, it is logged and requests continue."""
        for listener in self.listeners:
            try:
                getattr(listener, event)(*args)
            except Exception:
                logger.exception("a listener raised an exception in %s", event)

    def _update(self, request: RequestState, delta: RequestDelta, now: float) -> None:
        if delta.error_kind is not None:
            self._fail(request, error_named(delta.error_kind, delta.error or ""))
            return
        num_tokens = request.update(delta)
        if num_tokens:
            self._notify("on_tokens", request.message.request_id, num_tokens, now)
        if request.is_finished:
            self._end(request)
            self._abort_in_engine([] if delta.finished else [request])

    def _fail(self, request: RequestState, error: QuireError) -> None:
        request.fail(error)
        self._end(request)

    def _abort_in_engine(self, requests: Sequence[RequestState]) -> None:
        if requests and self._engine.death is None:
            self._engine.send(Abort([request.message.request_id for request in requests]))

    def _end(self, request: RequestState) -> None:
        """Remove a request."""
        del self._requests[request.message.key]
        request_id, outputs = request.message.request_id, request.outputs
        self._request_ids.discard(request_id)
        end = outputs.metrics, outputs.num_cached_tokens, request.finish_reason, request.longest
        self._notify("on_request_end", request_id, *end)
