"""The router: gives each request to the engine from which its first token is expected soonest."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.engine.routing.prefix_index import PrefixIndex
from quire.kv.prefix_cache.content_hash import BlockHash

TOLERANCE = 0.25
"""Engines whose expected times differ by less than this share are taken to be equally fast."""
SLACK_TOKENS = 16
"""Differences of fewer tokens do not matter either, since a step has costs that do not depend on their number."""
SAME_KIND = 2.0
"""Engines whose measured times differ by less than this factor are taken to be equally fast."""
MEMORY = 0.9
"""The weight of what was measured before, when another measurement comes."""
FIRST_GUESS = 128.0
"""Tokens that a request is expected to get, before one has ended."""


@dataclass(slots=True)
class EngineLoad:
    """What the router knows of one engine's work."""

    num_queued: int = 0
    """Prompt tokens to be computed, of requests without a token."""
    num_running: int = 0
    """Requests that have got a token and have not ended: each takes a row of every step."""
    num_given: float = 0.0
    """All tokens given to the engine so far, with those that its requests are expected to get. Of equally fast engines,
    the one with the least gets the next request."""
    seconds: float = 0.0
    """The sum of times until first tokens, with older ones weighing less."""
    tokens: float = 0.0
    """How many tokens were expected to be computed meanwhile."""
    pace_s: float | None = None
    """Seconds for each token; None before anything was measured."""

    @property
    def num_before(self) -> int:
        """Rows to be computed before another request's first token, besides its own."""
        return self.num_queued + self.num_running


@dataclass(slots=True, eq=False)
class Route:
    """A request at an engine, from `Router.add` until `Router.end`."""

    engine: int
    load: EngineLoad
    hashes: Sequence[BlockHash]
    num_uncached: int
    """Tokens of its prompt that the engine was expected to compute."""
    num_expected: int
    """Tokens that the engine was expected to compute until the first one of this request, its own prompt included."""
    sent_s: float
    num_new: float
    """Tokens that it is expected to get and has not got yet."""
    num_got: int = 0
    """Tokens that it has got."""


class Router:
    """Chooses by (queued + uncached tokens) x measured seconds for each token. It has no clock, thread or socket.

    A conversation thus stays with the engine that holds its beginning, for as long as computing it again elsewhere
    would take longer than waiting. Engines are called by numbers, which the caller chooses.
    """

    def __init__(self, block_size: int) -> None:
        self.index = PrefixIndex()
        self.loads: dict[int, EngineLoad] = {}
        """By number, the engines that take requests or have some."""
        self._paces_s: list[float] = []
        """The known ones of `loads`, in ascending order."""
        self._block_size = block_size
        self._mean_new = FIRST_GUESS
        """Tokens that a request gets on average, with older ones weighing less."""

    def add_engine(self, engine: int) -> None:
        """An engine is ready, with an empty cache. It takes part as if it had had the others' share of the past."""
        given = [load.num_given for load in self.loads.values()]
        self.loads[engine] = EngineLoad(num_given=sum(given) / len(given) if given else 0.0)

    def remove_engine(self, engine: int) -> None:
        """An engine is gone, with its cache. The caller ends the routes of the requests that it had."""
        load = self.loads.pop(engine, None)
        if load is not None:
            self._set_pace(load, None)
        self.index.forget(engine)

    def choose(self, hashes: Sequence[BlockHash], num_tokens: int, engines: Iterable[int]) -> int:
        """Of these engines, the one for a prompt of this many tokens, whose full blocks have these hashes.

        Of about equally fast ones, it is the one that has the least to compute for it, and then the one that has been
        given the least so far. Raises ValueError if there are no engines.
        """
        uncached = self._num_uncached(hashes, num_tokens, engines)
        loads, usual_s = [self.loads[engine] for engine in uncached], self._usual_pace_s()
        rows = [load.num_queued + load.num_running + num for load, num in zip(loads, uncached.values(), strict=True)]
        each = zip(uncached.items(), loads, rows, strict=True)
        if self._are_of_one_kind(usual_s):
            limit_s = min(rows) * usual_s * (1 + TOLERANCE)
            fast = [
                (num_uncached, load.num_given, engine)
                for (engine, num_uncached), load, num in each
                if (num - SLACK_TOKENS) * usual_s <= limit_s
            ]
        else:
            paces_s = [self._pace_s(load, usual_s) for load in loads]
            limit_s = min([num * pace_s for num, pace_s in zip(rows, paces_s, strict=True)]) * (1 + TOLERANCE)
            fast = [
                (num_uncached, load.num_given, engine)
                for ((engine, num_uncached), load, num), pace_s in zip(each, paces_s, strict=True)
                if (num - SLACK_TOKENS) * pace_s <= limit_s
            ]
        return min(fast)[2]

    def _are_of_one_kind(self, usual_s: float) -> bool:
        """Whether all engines count as equally fast."""
        paces_s = self._paces_s
        return not paces_s or (paces_s[0] / usual_s > 1 / SAME_KIND and paces_s[-1] / usual_s < SAME_KIND)

    def _pace_s(self, load: EngineLoad, usual_s: float) -> float:
        """An engine's own pace, or the usual one if it is not far from that or unknown."""
        pace_s = load.pace_s or usual_s
        return usual_s if 1 / SAME_KIND < pace_s / usual_s < SAME_KIND else pace_s

    def _num_uncached(self, hashes: Sequence[BlockHash], num_tokens: int, engines: Iterable[int]) -> dict[int, int]:
        """By engine, the tokens of a prompt that it has to compute: at least the last one."""
        held = self.index.num_blocks(hashes, engines)
        size, whole = self._block_size, max(1, num_tokens)
        return {engine: max(1, num_tokens - num * size) if num else whole for engine, num in held.items()}

    def _usual_pace_s(self) -> float:
        """The median of all engines' paces. Engines whose own are not far from it are taken to be as fast: engines of
        one kind differ by chance, and the faster ones would get nearly everything."""
        paces_s = self._paces_s
        middle = len(paces_s) // 2
        if len(paces_s) % 2:
            return paces_s[middle]
        return (paces_s[middle - 1] + paces_s[middle]) / 2 if paces_s else 1.0  # if nothing was measured, any will do

    def _set_pace(self, load: EngineLoad, pace_s: float | None) -> None:
        if load.pace_s is not None:
            del self._paces_s[bisect_left(self._paces_s, load.pace_s)]
        load.pace_s = pace_s
        if pace_s is not None:
            insort(self._paces_s, pace_s)

    def add(
        self, engine: int, hashes: Sequence[BlockHash], num_tokens: int, now: float, most_new: float = 0.0
    ) -> Route:
        """A request was sent to the engine; `hashes` and `num_tokens` are as for `choose`, `now` is in seconds. It will
        get at most `most_new` tokens; as many are expected as others have got, if that is less."""
        load, num_uncached = self.loads[engine], self._num_uncached(hashes, num_tokens, [engine])[engine]
        num_new = min(most_new, self._mean_new)
        route = Route(engine, load, hashes, num_uncached, load.num_before + num_uncached, now, num_new)
        self.index.expect(engine, hashes)
        load.num_queued += num_uncached
        load.num_given += num_uncached + num_new
        return route

    def on_tokens(self, route: Route, num_tokens: int, now: float) -> None:
        """The request has got tokens. The first ones show how fast the engine is."""
        load = route.load
        if route.num_new >= num_tokens:
            route.num_new -= num_tokens
        else:
            load.num_given += num_tokens - route.num_new
            route.num_new = 0.0
        if not route.num_got:
            load.num_queued -= route.num_uncached
            load.num_running += 1
            load.seconds = MEMORY * load.seconds + max(0.0, now - route.sent_s)
            load.tokens = MEMORY * load.tokens + route.num_expected
            if self.loads.get(route.engine) is load:
                self._set_pace(load, load.seconds / load.tokens or None)
        route.num_got += num_tokens

    def end(self, route: Route) -> None:
        """The request has ended, or leaves the engine."""
        self.index.settle(route.engine, route.hashes)
        route.load.num_given -= route.num_new
        if route.num_got:
            route.load.num_running -= 1
            self._mean_new = MEMORY * self._mean_new + (1 - MEMORY) * route.num_got
        else:
            route.load.num_queued -= route.num_uncached
