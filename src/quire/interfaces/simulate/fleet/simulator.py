"""Replays a trace through the real router and several simulated engines on one virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from quire.common.memory import collection_paused
from quire.engine.requests.sequence import SequenceGroup
from quire.engine.routing.router import Route, Router
from quire.interfaces.simulate.arrivals import Arrivals
from quire.interfaces.simulate.fleet.events import Deaths, Scaling
from quire.interfaces.simulate.fleet.lane_routes import LaneRoutes
from quire.interfaces.simulate.fleet.prompts import Prompt, Prompts, prompts_ahead
from quire.interfaces.simulate.record import Record
from quire.interfaces.simulate.simulator import Simulator
from quire.interfaces.simulate.trace import TraceRequest
from quire.kv.prefix_cache.changes import PrefixChanges

_KEY = b"fleet"
"""All engines hash blocks with it, as the engines of a server do with a secret one."""
_TICK_S = 1.0
"""Seconds between two looks at the number of engines."""


@dataclass(slots=True, eq=False)
class FleetEngine:
    """One engine of a fleet, from its start to its death or removal."""

    number: int
    simulator: Simulator
    changes: PrefixChanges
    ready_s: float
    lane_routes: LaneRoutes
    routes: dict[str, Route] = field(default_factory=dict)
    """Of its unfinished requests, by id."""
    num_seen: dict[str, int] = field(default_factory=dict)
    """By request id, the number of tokens so far, for requests that may get several in a step."""
    ended: list[str] = field(default_factory=list)
    """The requests that have ended since the last step."""
    joined: list[SequenceGroup] = field(default_factory=list)
    """The requests that have joined the lane since the last step."""
    is_busy: bool = False
    """Whether a step runs."""
    num_tokens: int = 0
    """Tokens computed so far: the engine's work."""
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """The state of a fleet at one time."""

    time_s: float
    num_engines: int
    num_unfinished: int
    num_running: int


class FleetSimulator:
    """Runs one trace over a fleet. `engines` are those that run; the rest of the state is what the report needs."""

    def __init__(
        self,
        make_engine: Callable[[], Simulator],
        num_engines: int,
        *,
        router: type[Router] = Router,
        deaths: Deaths | None = None,
        scaling: Scaling | None = None,
        start_s: float = 10.0,
    ) -> None:
        """An engine that takes the place of a dead one, or is added, is ready after `start_s`."""
        self.now_s = 0.0
        self.record = Record()
        self.engines: dict[int, FleetEngine] = {}
        self.draining: set[int] = set()
        self.gone: list[FleetEngine] = []
        """Engines that died or were removed."""
        self.engine_s = 0.0
        """Seconds for which there were engines, the times of their starts included."""
        self.num_deaths = self.num_moved = 0
        self.moments: list[FleetMoment] = []
        self.arrivals = Arrivals(())
        self._make_engine, self._start_s, self._scaling = make_engine, start_s, scaling
        self._deaths = deaths or Deaths()
        self._lives: dict[int, Iterator[float]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting: deque[tuple[Simulator | None, tuple[float, int, TraceRequest, Prompt, int]]] = deque()
        self._starting: set[int] = set()
        self._high_s = 0.0
        self._num_unfinished = 0
        self._woken: dict[int, FleetEngine] = {}
        first = make_engine()
        self._block_size = first.blocks.block_size
        self._prompts = Prompts((), _KEY, self._block_size)
        self.router = router(self._block_size)
        for number in range(num_engines):
            self._ready(number)
        self._next_number = num_engines
        for time_s, number in self._deaths.at:
            self._at(time_s, lambda number=number: self._die(number))  # type: ignore[misc]
        self._at(_TICK_S, self._tick)

    def run(self, trace: Iterable[TraceRequest]) -> Record:
        """Run all requests of a trace, sorted by arrival, to their end."""
        return self._run(Prompts(trace, _KEY, self._block_size))

    def run_with_helper(self, make_trace: Callable[[], Iterable[TraceRequest]]) -> Record:
        """As `run`, with the same results, while another process makes the trace and its prompts. `make_trace` can be
        pickled."""
        with prompts_ahead(make_trace, _KEY, self._block_size) as prompts:
            return self._run(prompts)

    @collection_paused()  # a run leaves no cycles of objects: looking for them would take a tenth of its time
    def _run(self, prompts: Prompts) -> Record:
        self._prompts, self.arrivals = prompts, Arrivals(prompts.trace)
        for engine in self.engines.values():
            engine.simulator.arrivals = self.arrivals
        while True:
            arrival_s = self.arrivals.next_s
            if arrival_s is not None and arrival_s <= self._events[0][0]:
                self.now_s = max(self.now_s, arrival_s)
                for submitted_s, index, request in self.arrivals.due(self.now_s):
                    self._submit(submitted_s, index, request)
            elif arrival_s is None and not self._num_unfinished:
                self.engine_s += sum([self.now_s - engine.ready_s for engine in self.engines.values()])
                return self.record
            else:
                self.now_s, _, act = heappop(self._events)
                act()
            self._begin_steps()

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heappush(self._events, (time_s, next(self._order), act))

    # Requests

    def _submit(self, submitted_s: float, index: int, request: TraceRequest) -> None:
        history = self.arrivals.history(request)
        prompt = self._prompts.take(index, request, history)
        self._num_unfinished += 1
        self._place(None, (submitted_s, index, request, prompt, len(history)))

    def _place(self, other: Simulator | None, added: tuple[float, int, TraceRequest, Prompt, int]) -> None:
        """Give a request to an engine; it has been in the `other` one, if that is not None."""
        numbers = [*self.engines]
        if self.draining:
            numbers = [number for number in numbers if number not in self.draining] or numbers
        if not numbers:
            self._waiting.append((other, added))
            return
        submitted_s, index, request, prompt, history_len = added
        request_id, hashes, num_tokens = str(index), prompt.chain.blocks(), len(prompt.token_ids)
        num_seen = 0 if other is None else _num_output_tokens(other, request_id)
        engine = self.engines[self.router.choose(hashes, num_tokens + num_seen, numbers)]
        most_new = request.output_len * max(request.n, request.beam_width) - num_seen
        route = self.router.add(engine.number, hashes, num_tokens + num_seen, self.now_s, most_new)
        engine.routes[request_id] = route
        if other is None:
            engine.simulator.add(
                submitted_s,
                index,
                request,
                prompt.token_ids,
                history_len,
                chain=prompt.chain,
                expected=prompt.expected,
            )
        else:
            engine.simulator.take_over(other, request_id)
        if request_id in engine.simulator.unfinished and engine.simulator.may_get_several(request_id):
            engine.num_seen[request_id] = _num_output_tokens(engine.simulator, request_id)
        if engine.ended:  # it can never run
            self._end_routes(engine)
        self._woken[engine.number] = engine

    # Steps

    def _begin_steps(self) -> None:
        """Let the engines that have got something to do begin a step."""
        for engine in self._woken.values():
            simulator = engine.simulator
            if engine.is_busy or not simulator.requests or self.engines.get(engine.number) is not engine:
                continue
            simulator.now_s = self.now_s
            step_s = simulator.begin_step()
            engine.is_busy = True
            engine.busy_s += step_s
            engine.num_tokens += simulator.num_step_tokens
            self._at(self.now_s + step_s, lambda engine=engine: self._end_step(engine))  # type: ignore[misc]
        self._woken.clear()

    def _end_step(self, engine: FleetEngine) -> None:
        if self.engines.get(engine.number) is not engine:
            return
        engine.is_busy, engine.simulator.now_s = False, self.now_s
        engine.lane_routes.on_step()
        changed = engine.simulator.end_step()
        found, gone = engine.changes.take()
        if found:
            self.router.index.add(engine.number, found)
        if gone:
            self.router.index.discard(engine.number, gone)
        routes, num_seen, on_tokens = engine.routes, engine.num_seen, self.router.on_tokens
        for group in changed:
            request_id, seqs = group.request_id, group.seqs
            num_new = 1
            if request_id in num_seen:
                num = sum([len(seq.output.token_ids) for seq in seqs])
                num_new, num_seen[request_id] = num - num_seen[request_id], num
            on_tokens(routes[request_id], num_new, self.now_s)
        for group in engine.joined:
            engine.lane_routes.join(routes[group.request_id])
        engine.joined.clear()
        if engine.ended:
            self._end_routes(engine)
        if engine.number in self.draining and not engine.routes:
            self._remove(engine)
        else:
            self._woken[engine.number] = engine

    def _end_routes(self, engine: FleetEngine) -> None:
        for request_id in engine.ended:
            engine.num_seen.pop(request_id, None)
            self.router.end(engine.routes.pop(request_id))
            self._num_unfinished -= 1
        engine.ended.clear()

    # Engines

    def _ready(self, number: int) -> None:
        """A new engine takes part, with an empty cache."""
        simulator = self._make_engine()
        self.router.add_engine(number)
        lane_routes, changes = LaneRoutes(self.router.loads[number]), simulator.blocks.share_hashes(_KEY)
        simulator.blocks.tiers.evicted.most = 0  # the report does not say why tokens were not found
        engine = FleetEngine(number, simulator, changes, self.now_s, lane_routes)
        simulator.arrivals, simulator.record, simulator.on_end = self.arrivals, self.record, engine.ended.append
        simulator.lane.on_join = engine.joined.append
        simulator.lane.on_leave = lambda group: lane_routes.leave(engine.routes[group.request_id])
        self._starting.discard(number)
        self.engines[number] = engine
        delay_s = next(self._lives.setdefault(number, self._deaths.delays_s(number)), None)
        if delay_s is not None:
            self._at(self.now_s + delay_s, lambda: self._die(number, engine))
        waiting, self._waiting = self._waiting, deque()
        for other, added in waiting:
            self._place(other, added)

    def _die(self, number: int, victim: FleetEngine | None = None) -> None:
        """The engine of this number dies, unless it is not the `victim`; its requests move."""
        engine = self.engines.get(number)
        if engine is None or (victim is not None and engine is not victim):
            return
        self.num_deaths += 1
        self._forget(engine)
        engine.simulator.lane.leave()
        for route in engine.routes.values():
            self.router.end(route)
        for request_id in list(engine.simulator.unfinished):
            request, group = engine.simulator.unfinished[request_id]
            prompt = self._prompts.of(group.outputs.prompt_token_ids)
            self.num_moved += 1
            self._place(engine.simulator, (group.metrics.arrival_time, int(request_id), request, prompt, 0))
        if number in self.draining:
            self.draining.remove(number)
        else:
            self._start(number)

    def _start(self, number: int) -> None:
        self._starting.add(number)
        self.engine_s += self._start_s
        self._at(self.now_s + self._start_s, lambda: self._ready(number))

    def _remove(self, engine: FleetEngine) -> None:
        self.draining.discard(engine.number)
        self._forget(engine)

    def _forget(self, engine: FleetEngine) -> None:
        self.router.remove_engine(engine.number)
        self.engine_s += self.now_s - engine.ready_s
        self.gone.append(self.engines.pop(engine.number))

    def _tick(self) -> None:
        """Look at the number of engines, and change it if the load asks for it."""
        self._at(self.now_s + _TICK_S, self._tick)
        num_running = sum([len(engine.simulator.requests.running) for engine in self.engines.values()])
        self.moments.append(FleetMoment(self.now_s, len(self.engines), self._num_unfinished, num_running))
        if self._scaling is None:
            return
        serving = [engine for number, engine in self.engines.items() if number not in self.draining]
        num_engines, wanted = len(serving) + len(self._starting), self._scaling.wanted(self._num_unfinished)
        if wanted >= num_engines:
            self._high_s = self.now_s
        for _ in range(wanted - num_engines):
            self._start(self._next_number)
            self._next_number += 1
        if wanted < num_engines and self.now_s - self._high_s >= self._scaling.patience_s:
            self._high_s = self.now_s
            for engine in sorted(serving, key=lambda engine: len(engine.routes))[: num_engines - wanted]:
                self.draining.add(engine.number)
                if not engine.routes:
                    self._remove(engine)


def _num_output_tokens(simulator: Simulator, request_id: str) -> int:
    _, group = simulator.unfinished[request_id]
    return sum([seq.num_output_tokens for seq in group.seqs])
