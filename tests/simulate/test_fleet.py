"""A fleet of simulated engines behind the real router: replayable, with equal outputs; it finds wrong routers."""

import gc
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.common.errors import ConfigError
from quire.engine.routing.router import Router
from quire.interfaces.simulate.decoding import DecodeLane
from quire.interfaces.simulate.fleet.events import Deaths, Scaling, parse_deaths
from quire.interfaces.simulate.fleet.report import fleet_report
from quire.interfaces.simulate.fleet.simulator import FleetSimulator
from quire.interfaces.simulate.trace import TraceRequest
from quire.interfaces.simulate.workloads import chat_trace, dataset_trace, synthetic_trace, tenants_trace
from tests.effort import examples

from .helpers import make, simulate


class CheckedFleet(FleetSimulator):
    """Looks at every block and at the router's books after the run."""

    def run(self, trace):
        record = super().run(trace)
        for engine in self.engines.values():
            engine.simulator.scheduler.requests.check_integrity()
            assert not engine.routes
            assert engine.simulator.blocks.num_used_blocks == 0
            load = self.router.loads[engine.number]
            assert load.num_queued == load.num_running == 0
            assert load.num_given >= -1e-6
        assert set(self.router.loads) == set(self.engines)
        assert not self.router.index._expected
        assert not self.router.index._further
        for block_hash, holders in self.router.index._holders.items():
            known = [number for number, engine in self.engines.items() if block_hash in engine.changes._known]
            assert holders == sum(1 << number for number in known), "the index is not that of the caches"
        return record


def run(trace, engines=2, *, router=Router, deaths=None, scaling=None, start_s=10.0, **limits):
    made = partial(make, **{"num_blocks": 2048, **limits})
    fleet = CheckedFleet(made, engines, router=router, deaths=deaths, scaling=scaling, start_s=start_s)
    fleet.run(trace)
    return fleet_report(fleet)


def mixed(number=60, rate=12.0, **options):
    return synthetic_trace(5, number, requests_per_s=rate, **options)


@pytest.mark.parametrize("acceptance", [None, 0.7])
def test_one_engine_in_a_fleet_is_an_engine_alone(acceptance):
    fleet, alone = run(mixed(), 1, acceptance=acceptance), simulate(mixed(), num_blocks=2048, acceptance=acceptance)
    names = ("requests", "steps", "simulated_s", "output_tokens", "drafted_tokens", "accepted_tokens", "outputs_digest")
    for name in (*names, "first_token_s", "per_token_s"):
        assert fleet[name] == alone[name], name
    assert (fleet["accepted_tokens"] > 0) == (acceptance is not None)


def test_drafts_of_engines_that_died_are_reported():
    report = run(mixed(), 2, acceptance=1.0, deaths=Deaths(((2.0, 0),)), start_s=1.0)
    assert report["deaths"] == 1
    assert report["accepted_tokens"] == report["drafted_tokens"] > report["output_tokens"] / 4


@pytest.mark.parametrize("shape", [{}, {"n": 3}, {"beam_width": 3}], ids=["single", "samples", "beams"])
def test_deaths_and_numbers_of_engines_change_no_output(shape):
    alone = run(mixed(12, **shape), 1)
    killed = Deaths(((0.5, 0), (1.0, 1), (1.2, 2), (1.6, 0)))
    for options in ({"engines": 3}, {"engines": 3, "deaths": killed, "start_s": 0.5}):
        report = run(mixed(12, **shape), **options)
        assert report["outputs_digest"] == alone["outputs_digest"]
        assert report["requests"] == 12
    assert report["deaths"] == 4
    assert report["moved"] > 1


def test_without_any_engine_requests_wait_for_the_next():
    report = run(mixed(30), 1, deaths=Deaths(((0.4, 0),)), start_s=5.0)
    assert report["requests"] == 30
    assert report["moved"] > 0
    assert report["first_token_s"]["p99"] > 4.0
    assert report["outputs_digest"] == run(mixed(30), 1)["outputs_digest"]


def test_a_seed_determines_random_deaths():
    def report(seed):
        return run(mixed(), 3, deaths=Deaths((), 600.0, seed), start_s=1.0)

    assert report(1) == report(1) != report(2)
    assert report(1)["deaths"] > 0


def test_engines_are_added_under_load_and_removed_after_it():
    burst = [TraceRequest(0.01 * number, 50, 60) for number in range(80)]
    later = [TraceRequest(60.0 + 4 * number, 20, 4) for number in range(30)]
    fleet = CheckedFleet(partial(make, num_blocks=2048, seqs=8), 1, scaling=Scaling(1, 4, 8.0, 20.0), start_s=2.0)
    fleet.run([*burst, *later])
    sizes = [moment.num_engines for moment in fleet.moments]
    assert max(sizes) == 4
    assert sizes[0] == sizes[-1] == 1
    report = fleet_report(fleet)
    assert report["requests"] == 110
    assert report["engine_s"] < 0.7 * 4 * report["simulated_s"]


def test_a_request_that_never_fits_leaves_no_route():
    trace = [TraceRequest(0.0, 5000, 4), TraceRequest(0.1, 20, 4), TraceRequest(0.2, 20, 4, n=64)]
    report = run(trace, 2, num_blocks=64, seqs=8)
    assert (report["requests"], report["ignored"]) == (1, 2)


# The router


def test_chats_hit_nearly_as_much_as_in_one_cache_as_large_as_both():
    one = run(chat_trace(1, users=16, turns=4, system_len=400), 1, num_blocks=1200)
    two = run(chat_trace(1, users=16, turns=4, system_len=400), 2, num_blocks=600)
    assert two["prefix_hit_rate"] >= 0.95 * one["prefix_hit_rate"] > 0.8


@pytest.mark.parametrize(("engines", "rate"), [(2, 4.0), (2, 20.0), (3, 10.0)])
def test_without_hits_engines_get_equal_work(engines, rate):
    report = run(dataset_trace(60, 20, 1, 150, rate), engines)
    assert report["prefix_hit_rate"] == 0
    assert report["busiest_to_idlest"] <= 1.1


def test_a_burst_of_different_requests_is_shared_equally():
    """The router knows the most tokens that each may get."""
    for seed in (1, 2):
        burst = [TraceRequest(0.0, r.prompt_len, r.output_len) for r in dataset_trace(60, 60, seed, 64, 1.0)]
        assert run(burst, 2)["busiest_to_idlest"] <= 1.1


def test_a_new_engine_is_neither_starved_nor_stampeded():
    fleet = CheckedFleet(partial(make, num_blocks=2048), 2, deaths=Deaths(((6.0, 1),)), start_s=2.0)
    fleet.run(dataset_trace(60, 20, 1, 250, 12.0))
    first, second = fleet.engines[0], fleet.engines[1]
    rate = second.num_tokens / (fleet.now_s - second.ready_s)
    assert 0.6 < rate / (first.num_tokens / fleet.now_s) < 1.2


def test_shares_of_tenants_hold_across_engines():
    """Tenants that always have requests waiting get tokens by their weights, as in one engine."""

    def heavy(engines):
        trace = [
            TraceRequest(0.0, 40, 40, tenant=("a", "a", "b")[number % 3]) for number in range(90 * engines)
        ]  # fmt: skip
        shares = run(trace, engines, seqs=8, tokens=64, policy="fair", tenant_weights={"a": 1.0, "b": 1.0})
        return shares["tenants"]["b"]["contended_share"]

    one, two = heavy(1), heavy(2)
    assert abs(one - 0.5) < 0.05
    assert abs(two - one) < 0.05


def test_a_tenant_that_floods_does_not_delay_the_others_in_any_engine():
    trace = list(tenants_trace(1, 150, 3.0))
    report = run(trace, 2, seqs=16, tokens=256, policy="fair")["tenants"]
    fcfs = run(trace, 2, seqs=16, tokens=256)["tenants"]
    for name in ("steady-1", "steady-2"):
        assert report[name]["first_token_s"]["p50"] < 0.5 * fcfs[name]["first_token_s"]["p50"]


class IgnoresQueues(Router):
    def choose(self, hashes, num_tokens, engines):
        uncached = self._num_uncached(hashes, num_tokens, engines)
        return min(uncached, key=lambda engine: (uncached[engine], engine))


class IgnoresHits(Router):
    def _num_uncached(self, hashes, num_tokens, engines):
        return dict.fromkeys(engines, num_tokens)


class NeverUnlearns(Router):
    def __init__(self, block_size):
        super().__init__(block_size)
        self.index.discard = lambda engine, hashes: None


class SticksForever(Router):
    """A prompt that begins like another one goes where that one went."""

    def __init__(self, block_size):
        super().__init__(block_size)
        self.places = {}

    def choose(self, hashes, num_tokens, engines):
        engine = self.places.get(hashes[0]) if hashes else None
        return engine if engine in engines else super().choose(hashes, num_tokens, engines)

    def add(self, engine, hashes, *rest):
        if hashes:
            self.places.setdefault(hashes[0], engine)
        return super().add(engine, hashes, *rest)


class CountsDeadEngines(Router):
    """It keeps the index of an engine that has died."""

    def remove_engine(self, engine):
        self.loads.pop(engine, None)


class ForgetsToEnd(Router):
    def end(self, route):
        pass


class CountsNothingGiven(Router):
    def add(self, *args):
        route = super().add(*args)
        route.load.num_given = 0.0
        return route

    def on_tokens(self, route, num_tokens, now):
        super().on_tokens(route, num_tokens, now)
        route.load.num_given = 0.0


def spread(router):
    return run(dataset_trace(60, 20, 1, 150, 12.0), 2, router=router)


def chats(router):
    return run(chat_trace(1, users=16, turns=4, system_len=400), 2, router=router, num_blocks=600)


def hot_prefix(router):
    """All prompts begin alike, and one engine cannot serve them all."""
    trace = [TraceRequest(0.02 * number, 300, 20, 0, 256) for number in range(100)]
    return run(trace, 2, router=router, seqs=8)


def after_a_death(router):
    """One prefix is known to an engine that dies and comes back with an empty cache, and is not asked for again."""
    trace = [TraceRequest(5.0 * number, 600, 2, number // 3, 592) for number in range(6)]
    return run(trace, 2, router=router, deaths=Deaths(((12.0, 0),)), start_s=1.0)


def test_a_router_that_ignores_queues_is_found():
    assert hot_prefix(IgnoresQueues)["first_token_s"]["p90"] > 1.5 * hot_prefix(Router)["first_token_s"]["p90"]


def test_a_router_that_ignores_hits_is_found():
    assert chats(IgnoresHits)["prefix_hit_rate"] < 0.95 * chats(Router)["prefix_hit_rate"]


def test_a_router_that_never_unlearns_evictions_is_found():
    def evicting(router):
        return run(dataset_trace(100, 4, 1, 40, 20.0), 2, router=router, num_blocks=90)

    assert evicting(Router)["requests"] == 40
    with pytest.raises(AssertionError, match="not that of the caches"):
        evicting(NeverUnlearns)


def test_a_router_that_sticks_forever_is_found():
    assert hot_prefix(SticksForever)["busiest_to_idlest"] is None
    assert hot_prefix(Router)["busiest_to_idlest"] < 1.5


def test_a_router_that_counts_a_dead_engine_is_found():
    assert after_a_death(Router)["deaths"] == 1
    with pytest.raises(AssertionError, match="not that of the caches"):
        after_a_death(CountsDeadEngines)


def test_a_router_whose_books_do_not_close_is_found():
    with pytest.raises(AssertionError):
        spread(ForgetsToEnd)


def test_a_router_that_counts_nothing_given_is_found():
    assert spread(CountsNothingGiven)["busiest_to_idlest"] > 1.1 >= spread(Router)["busiest_to_idlest"]


# What is refused


@pytest.mark.parametrize("text", ["", "1", "1:x", "-1:0", "1:-1", "inf:0", "1:0,"])
def test_deaths_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError, match="SECONDS:ENGINE pairs"):
        parse_deaths(text)


def test_numbers_that_cannot_be_are_refused():
    assert parse_deaths("10:0,25.5:3") == ((10.0, 0), (25.5, 3))
    for arguments in ((0, 1), (3, 2), (1, 5000)):
        with pytest.raises(ConfigError, match="numbers must ascend from 1 to 1000"):
            Scaling(*arguments)
    with pytest.raises(ConfigError, match="must be more than 0"):
        Scaling(1, 2, 0.0)
    with pytest.raises(ConfigError, match="must be from 0 to 3600"):
        Deaths((), -1.0)


def reports(trace, **options):
    """What runs report: of one engine that looks after every step, and of two engines, one of which dies."""
    deaths = Deaths(((1.0, 0),))
    return simulate(trace, **options), run(trace, 2, deaths=deaths, start_s=0.5, **options)


@st.composite
def loads(draw):
    """Requests of all kinds, mostly single samples, and caches with and without room for them."""
    trace, arrival_s = [], 0.0
    for _ in range(draw(st.integers(2, 14))):
        arrival_s += draw(st.sampled_from([0.0, 0.01, 0.2]))
        prompt_len, fields = draw(st.integers(1, 40)), {"tenant": draw(st.sampled_from("ab"))}
        if draw(st.integers(0, 9)) == 0:
            fields["n"] = 2
        elif draw(st.booleans()):
            fields |= {"prefix_group": 0, "prefix_len": draw(st.integers(1, prompt_len))}
        elif draw(st.booleans()):
            fields["session"] = draw(st.integers(0, 1))
        trace.append(TraceRequest(round(arrival_s, 2), prompt_len, draw(st.integers(1, 40)), **fields))
    options = {
        "num_blocks": draw(st.sampled_from([45, 400])),
        "block_size": 4,
        "tokens": draw(st.sampled_from([6, 24, 256])),
        "seqs": draw(st.sampled_from([3, 64])),
        "caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority", "prefix"])),
        "target_step_ms": draw(st.sampled_from([None, 25.0])),
    }
    return trace, options


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(load=loads())
def test_a_lane_of_decodes_makes_the_steps_of_the_scheduler(load, monkeypatch):
    """With and without it, a run is the same to the last figure."""
    trace, options = load
    fast = reports(trace, **options)
    with monkeypatch.context() as patched:
        patched.setattr(DecodeLane, "join", lambda self, changed: None)
        patched.setattr(DecodeLane, "may_plan", lambda self: False)
        assert reports(trace, **options) == fast


def test_a_lane_makes_most_steps_of_an_ordinary_run(monkeypatch):
    made = []
    plan = DecodeLane.plan
    monkeypatch.setattr(DecodeLane, "plan", lambda self: made.append(len(self)) or plan(self))
    report = run(mixed(60), 2)
    assert len(made) > 0.95 * report["steps"]
    assert sum(made) > 0.95 * (report["output_tokens"] - 60)


def test_a_fleet_does_not_remember_what_its_engines_evict():
    """It would not fit into memory for many engines, and the report does not need it."""
    fleet = FleetSimulator(partial(make, num_blocks=64), 2)
    fleet.run(mixed(60))
    for engine in fleet.engines.values():
        blocks = engine.simulator.blocks
        assert blocks.stats.num_evicted_tokens > 0
        assert not any(blocks.stats.num_missed_tokens.values())


def test_a_run_leaves_no_cycles_of_objects_and_the_collector_as_it_was():
    """The collector is off while a fleet runs, so memory would grow with each of them."""

    def unreachable(number):
        gc.collect()
        fleet = FleetSimulator(partial(make, num_blocks=100), 2)
        gc.disable()
        fleet.run(dataset_trace(60, 20, 1, number, 12.0))
        assert not gc.isenabled()
        gc.enable()
        fleet.run(())
        assert gc.isenabled()
        return gc.collect()

    unreachable(10)
    assert unreachable(200) <= unreachable(20)
