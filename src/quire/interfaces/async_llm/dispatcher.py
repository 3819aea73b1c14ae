"""Gives each request to one of the engines, and the requests of an engine that dies to the others."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from quire.common.errors import InvalidParamsError, RequestError
from quire.common.log import logger
from quire.common.outputs import EngineStats
from quire.common.params import PoolingParams
from quire.common.params.checks import check_request_id
from quire.engine.process.messages import Abort, AddAny, AddRequest, PrefixReport, ProtocolError, Ready, ShareHashes
from quire.engine.requests.input_processor import CheckedRequest, InputProcessor
from quire.engine.routing.router import Router
from quire.interfaces.async_llm.engine_message import AnyParams, engine_message
from quire.interfaces.async_llm.listener import RequestListener
from quire.interfaces.async_llm.output_processor import RequestState
from quire.interfaces.async_llm.request_table import RequestTable
from quire.interfaces.async_llm.supervisor import Supervisor
from quire.kv.prefix_cache.content_hash import BlockHash, ContentHasher, HashChain

_DRAIN_TICK_S = 0.05


class Dispatcher:
    """Owns all valid requests until they end. It must be used in one event loop."""

    def __init__(
        self,
        engines: Sequence[Supervisor],
        ready: Sequence[Ready],
        inputs: InputProcessor,
        block_size: int,
        *,
        holds: bool,
    ) -> None:
        """If `holds`, requests that are added while no engine runs wait for the next one."""
        states = zip(engines, ready, strict=True)
        self.tables = [RequestTable(number, engine, state.stats, self) for number, (engine, state) in enumerate(states)]
        """The requests of each engine."""
        self.listeners: list[RequestListener] = []
        self.draining: set[int] = set()
        """The numbers of engines that get no further requests."""
        self.is_closing = False
        """Whether all engines are about to end, so that no request moves."""
        self._inputs = inputs
        self._holds = holds
        self._request_ids: dict[str, RequestState] = {}
        self._num_keys = self._num_seeds = 0
        self._block_size = block_size
        self._router = Router(block_size)
        self._hash_key = secrets.token_bytes()
        self._hasher = ContentHasher(self._hash_key)
        for table in self.tables:
            self._join(table)

    def _join(self, table: RequestTable) -> None:
        """An engine is ready: with others beside it, it reports which prefixes it holds."""
        self._router.add_engine(table.number)
        if len(self.tables) > 1:
            table.engine.send(ShareHashes(self._hash_key))

    def add(
        self,
        checked: Sequence[CheckedRequest],
        params: AnyParams | None,
        changed: asyncio.Event,
        *,
        holds: bool = False,
    ) -> list[RequestState]:
        """Send requests to engines, whose caller awaits the event `changed`; without `params` they are only scored.
        Pooling requests are one message for each engine. With `holds`, these wait for the next engine while none runs,
        even if others do not. Raises RequestError or EngineDeadError, and then sends nothing.

        Parameters without a seed get one here, so that every engine samples the same tokens for them.
        """
        first, self._num_keys = self._num_keys, self._num_keys + len(checked)
        request_ids = [each.outputs.request_id for each in checked]
        for request_id in request_ids:
            check_request_id(request_id)
        for request_id, count in Counter(request_ids).items():
            if count > 1 or request_id in self._request_ids:
                raise RequestError(f"request id {request_id!r} is in use by an unfinished request: choose another")
        made: list[RequestState] = []
        try:
            seed = self._inputs.seed(self._num_seeds)
            added = [engine_message(key, each, params, seed) for key, each in enumerate(checked, first)]
            for message, each in zip(added, checked, strict=True):
                made.append(RequestState(message, each.outputs, each.sample, changed, self._hashes(each, message)))
                self._place(made[-1])
            self._send(made, holds or self._holds)
        except (OverflowError, TypeError, UnicodeError, ProtocolError) as error:
            self._take_back(made)
            raise InvalidParamsError(f"the request cannot be sent to the engine: {error}") from error
        except BaseException:
            self._take_back(made)
            raise
        self._num_seeds += params is not None and not isinstance(params, PoolingParams)
        for request in made:
            self._request_ids[request.message.request_id] = request
            given = request.outputs.params if params is None or isinstance(params, PoolingParams) else params
            self._notify("on_request_start", request.message.request_id, len(request.message.token_ids), given)
        return made

    def _place(self, request: RequestState) -> None:
        """Choose the request's engine: one that runs or, if none does, one that is expected to."""
        table = self._choose(request.hashes, len(request.message.token_ids)) or self._next_table()
        table.hold(request)
        self.begin_route(request, table)

    def _send(self, requests: Sequence[RequestState], holds: bool) -> None:
        for table in self.tables:
            messages = [request.message for request in requests if request.table is table]
            if messages and (table.is_running or table.engine.is_lost or not holds):
                table.send(messages)

    def _take_back(self, requests: Sequence[RequestState]) -> None:
        """These requests were not sent."""
        for request in requests:
            if (table := request.table) is not None:
                table.release(request)
                request.table = None
                if len(self.tables) > 1 and table.is_running:  # an earlier engine may have received it
                    table.engine.send(Abort([request.message.request_id]))

    def _hashes(self, checked: CheckedRequest, message: AddAny) -> Sequence[BlockHash]:
        """The hashes of the prompt's full blocks; none where there is nothing to choose."""
        if len(self.tables) == 1:
            return ()
        chain = HashChain(self._hasher, self._block_size, checked.content_key)
        chain.extend(len(message.token_ids) // self._block_size, message.token_ids)
        return chain.blocks()

    def _choose(
        self, hashes: Sequence[BlockHash], num_tokens: int, besides: RequestTable | None = None
    ) -> RequestTable | None:
        """The engine for a prompt: one that runs, and if there is one, does not drain and answers. None: none runs."""
        running = [table.number for table in self.tables if table.is_running and table is not besides]
        if len(self.tables) == 1:
            return self.tables[0] if running else None
        engines = [number for number in running if number not in self.draining] or running
        engines = [number for number in engines if not self.tables[number].engine.is_silent] or engines
        return self.tables[self._router.choose(hashes, num_tokens, engines)] if engines else None

    def _next_table(self) -> RequestTable:
        """An engine that is expected to run again, if there is one."""
        return next((table for table in self.tables if not table.engine.is_lost), self.tables[0])

    def begin_route(self, request: RequestState, table: RequestTable) -> None:
        """The request was sent to the engine."""
        if table.is_running and len(self.tables) > 1:
            num_tokens = len(request.message.token_ids) + request.longest
            num_new = _most_new(request)
            request.route = self._router.add(table.number, request.hashes, num_tokens, time.monotonic(), num_new)

    def end_route(self, request: RequestState) -> None:
        """The request leaves its engine."""
        if request.route is not None:
            self._router.end(request.route)
            request.route = None

    async def drain(self) -> None:
        """Wait until little is left to send, as far as engines run."""
        for table in self.tables:
            await table.engine.drain()

    def abort(self, request_id: str) -> None:
        """Abort the request with this id, if there is one."""
        if (request := self._request_ids.get(request_id)) is not None:
            self.abort_requests([request])

    def abort_requests(self, requests: Iterable[RequestState]) -> None:
        """Abort those of the requests that have not ended."""
        running = [request for request in requests if request.table is not None]
        for table in self.tables:
            table.abort([request for request in running if request.table is table])

    def on_report(self, table: RequestTable, report: PrefixReport) -> None:
        """An engine says which prefixes it holds."""
        self._router.index.add(table.number, report.found)
        self._router.index.discard(table.number, report.gone)

    def on_tokens(self, request: RequestState, num_tokens: int, now: float) -> None:
        """A request has got tokens."""
        if request.route is not None:
            self._router.on_tokens(request.route, num_tokens, now)
        self._notify("on_tokens", request.message.request_id, num_tokens, now)

    def on_death(self, table: RequestTable) -> int:
        """An engine has died: its requests continue in the others. Returns how many do; the rest waits."""
        self._router.remove_engine(table.number)
        return self.move(table, list(table.requests.values()))

    def move(self, table: RequestTable, requests: Sequence[RequestState]) -> int:
        """Let other engines continue these requests of an engine. Returns how many do."""
        num_moved = 0
        for request in requests if not self.is_closing else ():
            other = self._choose(request.hashes, len(request.message.token_ids) + request.longest, besides=table)
            if other is not None:
                table.release(request)
                other.replay(request)
                num_moved += 1
        return num_moved

    async def restart(self, table: RequestTable, drain_timeout_s: float) -> None:
        """Replace the engine by a new process. Its requests have this time to end; other engines take over the rest."""
        self.draining.add(table.number)
        try:
            ends_s = time.monotonic() + drain_timeout_s
            while table.requests and table.is_running and time.monotonic() < ends_s:
                await asyncio.sleep(_DRAIN_TICK_S)
            for request in list(table.requests.values()):
                self.move(table, [request])
            await table.engine.restart()
        finally:
            self.draining.discard(table.number)

    def on_loss(self, table: RequestTable) -> bool:
        """No engine is expected soon in this place: its requests wait for another one. False: there is none."""
        other = next((other for other in self.tables if not other.engine.is_lost), None)
        if other is None or self.is_closing:
            return False
        for request in list(table.requests.values()):
            table.release(request)
            other.hold(request)
        return True

    def on_restart(self, table: RequestTable) -> None:
        """A new engine is ready: it continues all requests that wait for an engine, in order of arrival."""
        self._join(table)
        owners = [other for other in self.tables if other is table or not other.is_running]
        waiting = [(request, owner) for owner in owners for request in owner.requests.values()]
        for request, owner in sorted(waiting, key=lambda pair: pair[0].message.key):
            owner.release(request)
            table.replay(request)

    def on_end(self, request: RequestState) -> None:
        """A request has ended."""
        request_id, outputs = request.message.request_id, request.outputs
        del self._request_ids[request_id]
        request.table = None
        end = outputs.metrics, outputs.num_cached_tokens, request.finish_reason, request.longest
        self._notify("on_request_end", request_id, *end)

    def stats(self) -> EngineStats:
        """The statistics of all engines after their latest steps, added up."""
        first, *others = [table.stats for table in self.tables]
        return sum(others, first)

    def notify_step(self) -> None:
        """An engine has finished a step."""
        self._notify("on_step", self.stats())

    def _notify(self, event: str, *args: Any) -> None:
        """Notify the listeners of an event. If one raises an exception, it is logged and requests continue."""
        for listener in self.listeners:
            try:
                getattr(listener, event)(*args)
            except Exception:
                logger.exception("a listener raised an exception in %s", event)


def _most_new(request: RequestState) -> float:
    """The most tokens that a request can still get; infinite if it has no limit of its own, 0 if it draws none."""
    if not isinstance(request.message, AddRequest):
        return 0.0
    params = request.outputs.params
    return math.inf if params.max_tokens is None else params.num_samples * (params.max_tokens - request.longest)
