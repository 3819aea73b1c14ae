"""The router of several engines, with engines of known speed on a clock of the test's own."""

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.routing.prefix_index import PrefixIndex
from quire.engine.routing.router import Route, Router
from tests.effort import examples

BLOCK = 16


def hashes_of(*parts: tuple[str, int]) -> list[bytes]:
    """Hashes of a prompt that is made of parts, each a name and a number of blocks."""
    names, found = "", []
    for name, num_blocks in parts:
        for index in range(num_blocks):
            names += f"{name}{index} "
            found.append(names.encode())
    return found


class Fleet:
    """Engines that compute one prompt after another, each at its own pace, and then keep its blocks."""

    def __init__(self, paces_s: list[float], router: Router | None = None) -> None:
        self.router = router or Router(BLOCK)
        self.paces_s, self.now = paces_s, 0.0
        self.free_s = [0.0] * len(paces_s)
        self.caches: list[set[bytes]] = [set() for _ in paces_s]
        self.num_computed, self.num_prompts, self.num_hit = [0] * len(paces_s), 0, 0
        self.delays_s: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        for engine in range(len(paces_s)):
            self.router.add_engine(engine)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), do))

    def send(self, hashes: list[bytes], num_tokens: int, num_out: int = 8) -> None:
        engine = self.router.choose(hashes, num_tokens, range(len(self.paces_s)))
        route = self.router.add(engine, hashes, num_tokens, self.now)
        held = 0
        for block_hash in hashes:
            if block_hash not in self.caches[engine]:
                break
            held += 1
        self.num_prompts, self.num_hit = self.num_prompts + num_tokens, self.num_hit + held * BLOCK
        num_uncached = max(1, num_tokens - held * BLOCK)
        self.num_computed[engine] += num_uncached
        self.caches[engine].update(hashes)
        start_s = max(self.now, self.free_s[engine])
        self.free_s[engine] = first_s = start_s + num_uncached * self.paces_s[engine]
        self.delays_s.append(first_s - self.now)
        self.at(first_s, lambda: self._first(route, hashes))
        self.at(first_s + num_out * self.paces_s[engine], lambda: self.router.end(route))

    def _first(self, route: Route, hashes: list[bytes]) -> None:
        self.router.index.add(route.engine, hashes)
        self.router.on_tokens(route, 1, self.now)

    def run(self) -> None:
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()


def poisson(seed: int, number: int, rate: float) -> Iterator[float]:
    chance, now = random.Random(seed), 0.0
    for _ in range(number):
        now += chance.expovariate(rate)
        yield now


@pytest.mark.parametrize("rate", [2.0, 12.0, 30.0])
@pytest.mark.parametrize("num_engines", [2, 3])
def test_without_hits_equal_engines_get_equal_shares(num_engines: int, rate: float) -> None:
    fleet, chance = Fleet([0.001] * num_engines), random.Random(3)
    for number, time_s in enumerate(poisson(1, 600, rate)):
        size = chance.randint(2, 8)
        fleet.at(time_s, lambda n=number, s=size: fleet.send(hashes_of((f"r{n}-", s)), s * BLOCK + 5))  # type: ignore[misc]
    fleet.run()
    assert max(fleet.num_computed) <= 1.1 * min(fleet.num_computed)


def test_a_slow_engine_gets_less_and_is_not_forgotten() -> None:
    fleet = Fleet([0.001, 0.004])
    for number, time_s in enumerate(poisson(2, 800, 12.0)):
        fleet.at(time_s, lambda n=number: fleet.send(hashes_of((f"r{n}-", 5)), 5 * BLOCK + 3))  # type: ignore[misc]
    fleet.run()
    fast, slow = fleet.num_computed
    assert 0.02 * fast < slow < 0.6 * fast


def chat(fleet: Fleet, seed: int, num_sessions: int, num_turns: int, rate: float) -> None:
    """Sessions with one system prompt, whose turns come while others' do."""
    chance = random.Random(seed)
    for session in range(num_sessions):
        start_s = chance.random() * num_sessions / rate
        for turn in range(num_turns):
            hashes = hashes_of(("system", 20), (f"s{session}-", 10 * (turn + 1)))
            time_s = start_s + turn * 5.0
            fleet.at(time_s, lambda h=hashes: fleet.send(h, len(h) * BLOCK + 7))  # type: ignore[misc]


def test_sessions_hit_nearly_as_much_as_in_one_cache() -> None:
    shares = []
    for paces_s in ([0.0005], [0.001, 0.001]):
        fleet = Fleet(paces_s)
        chat(fleet, 5, num_sessions=60, num_turns=6, rate=1.0)
        fleet.run()
        shares.append(fleet.num_hit / fleet.num_prompts)
    one, two = shares
    assert two >= 0.95 * one
    assert max(fleet.num_computed) <= 1.5 * min(fleet.num_computed)


def test_a_session_leaves_an_engine_that_is_busy_for_longer_than_computing_it_again_takes() -> None:
    router = Router(BLOCK)
    for engine in (0, 1):
        router.add_engine(engine)
    session = hashes_of(("s", 10))
    router.index.add(0, session)
    assert router.choose(session, 10 * BLOCK + 5, [0, 1]) == 0
    router.add(0, hashes_of(("x", 5)), 5 * BLOCK, 0.0)
    assert router.choose(session, 10 * BLOCK + 5, [0, 1]) == 0
    router.add(0, hashes_of(("y", 10)), 10 * BLOCK, 0.0)
    assert router.choose(session, 10 * BLOCK + 5, [0, 1]) == 1


def test_equal_prompts_that_come_at_once_are_computed_once_per_engine_at_most() -> None:
    router = Router(BLOCK)
    for engine in (0, 1):
        router.add_engine(engine)
    prompt = hashes_of(("p", 10))
    routes = [router.add(router.choose(prompt, 165, [0, 1]), prompt, 165, 0.0) for _ in range(8)]
    assert sum(route.num_uncached > 100 for route in routes) <= 2


def test_an_engine_that_is_gone_is_not_chosen_and_comes_back_empty() -> None:
    router = Router(BLOCK)
    for engine in (0, 1):
        router.add_engine(engine)
    prompt = hashes_of(("p", 10))
    route = router.add(0, prompt, 165, 0.0)
    router.index.add(0, prompt)
    router.remove_engine(0)
    router.end(route)
    assert len(router.index) == 0
    assert router.choose(prompt, 165, [1]) == 1
    with pytest.raises(ValueError, match="empty"):
        router.choose(prompt, 165, [])
    for number in range(4):
        router.add(1, hashes_of((f"q{number}", 10)), 165, 0.0)
    router.add_engine(0)
    router.on_tokens(route, 3, 9.0)
    assert router.loads[0].num_given == router.loads[1].num_given
    assert router.loads[0].num_before == 0
    assert router.choose(prompt, 165, [0, 1]) == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 7), st.integers(0, 7)), max_size=40)
)
def test_the_index_answers_as_sets_do(steps: list[tuple[int, int, int, int]]) -> None:
    index = PrefixIndex()
    held: list[set[bytes]] = [set(), set(), set()]
    expected: list[list[bytes]] = [[], [], []]
    chain = [bytes([number]) for number in range(8)]
    for kind, engine, start, end in steps:
        part = chain[start:end]
        match kind:
            case 0:
                index.add(engine, part)
                held[engine] |= set(part)
            case 1:
                index.discard(engine, part)
                held[engine] -= set(part)
            case 2:
                index.expect(engine, part)
                expected[engine] += part
            case 3:
                known = [block_hash for block_hash in part if block_hash in expected[engine]]
                index.settle(engine, known)
                for block_hash in known:
                    expected[engine].remove(block_hash)
            case _:
                index.forget(engine)
                held[engine].clear()
        lengths = {}
        for number in range(3):
            has = [block_hash in held[number] or block_hash in expected[number] for block_hash in chain]
            lengths[number] = [*has, False].index(False)
        assert index.num_blocks(chain, range(3)) == lengths
    assert len(index) == len(set().union(*held, *expected))
