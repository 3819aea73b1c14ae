"""The times at which the requests of a trace are submitted, and the history of conversations."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from quire.interfaces.simulate.trace import TraceRequest


@dataclass(slots=True)
class _Session:
    """A conversation, of which at most one turn runs at a time; later turns wait."""

    history: array[int] = field(default_factory=lambda: array("i"))
    end_s: float = -inf
    busy: bool = False
    turns: deque[tuple[int, TraceRequest]] = field(default_factory=deque)


class Arrivals:
    """Submits the requests of a trace, sorted by arrival; a turn of a session waits for the end of the previous one."""

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self._trace = enumerate(trace)
        self._upcoming = next(self._trace, None)
        self._ready: list[tuple[float, int, TraceRequest]] = []
        self._sessions: dict[int, _Session] = {}

    @property
    def next_s(self) -> float | None:
        """Time at which the next request is submitted; None if no submission is scheduled."""
        if self._upcoming is None:
            return self._ready[0][0] if self._ready else None
        arrival_s = self._upcoming[1].arrival_s
        return min(arrival_s, self._ready[0][0]) if self._ready else arrival_s

    def due(self, now_s: float) -> Iterator[tuple[float, int, TraceRequest]]:
        """Yield (time, index in the trace, request) of the requests submitted up to now."""
        while self._upcoming is not None and self._upcoming[1].arrival_s <= now_s:
            index, request = self._upcoming
            session = self._session(request)
            if session is None:
                heappush(self._ready, (request.arrival_s, index, request))
            else:
                session.turns.append((index, request))
                self._next_turn(session)
            self._upcoming = next(self._trace, None)
        while self._ready and self._ready[0][0] <= now_s:
            yield heappop(self._ready)

    def history(self, request: TraceRequest) -> list[int]:
        """Return the tokens of the conversation before this turn: its prompts and answers."""
        session = self._session(request)
        return [] if session is None else session.history.tolist()

    def ended(self, request: TraceRequest, now_s: float, token_ids: Iterable[int] | None = None) -> None:
        """Note that a request has ended; `token_ids` is the conversation with the answer, None without an answer."""
        session = self._session(request)
        if session is None:
            return
        if token_ids is not None:
            session.history = array("i", token_ids)
        session.end_s, session.busy = now_s, False
        self._next_turn(session)

    def _session(self, request: TraceRequest) -> _Session | None:
        if request.session is None:
            return None
        return self._sessions.setdefault(request.session, _Session())

    def _next_turn(self, session: _Session) -> None:
        if session.busy or not session.turns:
            return
        index, request = session.turns.popleft()
        session.busy = True
        heappush(self._ready, (max(request.arrival_s, session.end_s + request.think_s), index, request))
