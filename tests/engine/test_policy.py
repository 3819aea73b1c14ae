"""Who starts next under each policy, and that nobody is lost, starved or favoured for having been idle."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.errors import ConfigError
from quire.config.scheduler import POLICIES, SchedulerConfig
from quire.engine.requests.sequence import SequenceStatus
from quire.engine.scheduling import policy as policy_module
from quire.engine.scheduling.policy import make_policy
from tests.effort import examples


@dataclass(eq=False)
class FakeGroup:
    """What a policy may know of a request."""

    order: int
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    num_tokens: int = 10
    hit: int = 0
    swapped: bool = False
    seqs: list = field(init=False)

    def __post_init__(self):
        self.request_id = str(self.order)
        self.metrics = SimpleNamespace(arrival_time=self.arrival)
        self.params = SimpleNamespace(priority=self.priority)
        status = SequenceStatus.SWAPPED if self.swapped else SequenceStatus.WAITING
        seq = SimpleNamespace(status=status, num_tokens=self.num_tokens, num_uncomputed_tokens=self.num_tokens)
        self.seqs = self.unfinished_seqs = [seq]


def make(name, **fields):
    return make_policy(SchedulerConfig(8, 8, policy=name, **fields), lambda group: group.hit)


def filled(policy, groups):
    for group in groups:
        policy.add(group)
    return policy


def orders(policy, now_s=0.0):
    return [group.order for group in policy.candidates(now_s)]


def start_next(policy, now_s=0.0):
    group = next(policy.candidates(now_s))
    policy.remove(group)
    return group


def serve(policy, group):
    """The life of a started request that gets its tokens in one step."""
    policy.charge(group, group.num_tokens)
    policy.forget(group)


def test_first_come_first_served_also_after_preemption():
    groups = [FakeGroup(order) for order in range(5)]
    policy = filled(make("fcfs"), groups)
    started = [start_next(policy) for _ in range(3)]
    assert [group.order for group in started] == [0, 1, 2]
    policy.add(started[1])
    assert orders(policy) == [1, 3, 4]


@pytest.mark.essential
def test_smaller_priority_numbers_start_first_and_are_preempted_last():
    low, high, equal = FakeGroup(0, priority=1), FakeGroup(1, priority=-1), FakeGroup(2, priority=1)
    policy = filled(make("priority"), [low, high, equal])
    assert orders(policy) == [1, 0, 2]
    assert policy.rank(high) < policy.rank(low) == policy.rank(equal)
    policy.remove(high)
    policy.add(high)
    assert orders(policy) == [1, 0, 2]


def test_a_low_priority_is_started_in_bounded_time_under_a_stream_of_high_ones():
    policy = make("priority", priority_aging_s=10.0)
    low = FakeGroup(0, arrival=0.0, priority=3)
    policy.add(low)
    for second in range(100):  # one high arrives and one starts each second: the queue never empties
        policy.add(FakeGroup(second + 1, arrival=float(second), priority=0))
        if start_next(policy) is low:
            break
    assert second == 30


def test_equal_tenants_take_turns_within_one_pass():
    groups = [FakeGroup(order, tenant="a") for order in range(4)] + [FakeGroup(4, tenant="b"), FakeGroup(5, tenant="b")]
    policy = filled(make("fair"), groups)
    started = []
    for group in policy.candidates(0.0):
        policy.remove(group)
        started.append(group.order)
    assert started == [0, 4, 1, 5, 2, 3]


def test_within_one_pass_a_tenant_gets_as_much_more_as_its_weight_says():
    groups = [FakeGroup(order, tenant="a") for order in range(4)] + [FakeGroup(4, tenant="b"), FakeGroup(5, tenant="b")]
    policy = filled(make("fair", tenant_weights={"a": 2.0}), groups)
    started = []
    for group in policy.candidates(0.0):
        policy.remove(group)
        started.append(group.order)
    assert started == [0, 4, 1, 2, 5, 3]


@pytest.mark.parametrize(("name", "expected"), [("fcfs", [0, 1, 2, 3]), ("fair", [0, 1, 3, 2])])
def test_a_look_at_the_queue_shows_the_first_of_it(name, expected):
    """By tenant where they take turns, for each has a queue of its own."""
    groups = [FakeGroup(order, tenant=tenant) for order, tenant in enumerate("aaba")]
    policy = filled(make(name), groups)
    for limit in range(6):
        assert [group.order for group in policy.queued(limit)] == expected[:limit]
    policy.remove(groups[1])
    assert [group in policy for group in groups] == [True, False, True, True]
    assert FakeGroup(9, tenant="new") not in policy


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_users_of_a_key_share_what_the_key_gets(weight):
    """However many a client names."""
    groups = [FakeGroup(order, tenant=f"a/{order}") for order in range(4)]
    groups += [FakeGroup(4, tenant="b"), FakeGroup(5, tenant="b/x"), FakeGroup(6, tenant="a/0")]
    policy = filled(make("fair", tenant_weights={"a": weight, "a/3": 9.0}), groups)
    started = [start_and_charge(policy).order for _ in groups]
    assert started == ([0, 4, 1, 5, 2, 3, 6] if weight == 1.0 else [0, 4, 1, 2, 5, 3, 6])
    assert len(policy) == len(policy._queued) == 0


def start_and_charge(policy):
    serve(policy, group := start_next(policy))
    return group


def test_what_was_not_started_is_not_charged_within_a_pass():
    groups = [FakeGroup(order, tenant="a") for order in range(3)] + [FakeGroup(3, tenant="b")]
    assert orders(filled(make("fair"), groups)) == [0, 1, 2, 3]


@pytest.mark.essential
def test_tokens_of_backlogged_tenants_converge_to_their_weights():
    policy = make("fair", tenant_weights={"a": 2.0})
    filled(policy, [FakeGroup(order, tenant="a", num_tokens=7 + order % 5) for order in range(1000)])
    filled(policy, [FakeGroup(1000 + order, tenant="b", num_tokens=90) for order in range(200)])
    served = {"a": 0, "b": 0}
    while sum(served.values()) < 9000:
        group = start_next(policy)
        served[group.tenant] += group.num_tokens
        serve(policy, group)
    assert abs(served["a"] / 2 - served["b"]) <= 90


@pytest.mark.parametrize("num_in_between", [0, 1], ids=["idle", "light load"])
def test_neither_idleness_nor_a_light_load_earns_credit(num_in_between):
    policy = filled(make("fair"), [FakeGroup(order, tenant="busy") for order in range(300)])
    light = [FakeGroup(1000 + order, tenant="light") for order in range(20 * num_in_between)]
    policy.add(first := FakeGroup(999, tenant="light"))
    policy.remove(first)  # runs all the while, so that the tenant is never forgotten
    if not num_in_between:
        serve(policy, first)
    for order in range(200):
        serve(policy, start_next(policy))
        if order % 10 == 0 and light:
            policy.add(light.pop())
    filled(policy, [FakeGroup(2000 + order, tenant="light") for order in range(50)])
    started = []
    for _ in range(20):
        group = start_next(policy)
        started.append(group.tenant)
        serve(policy, group)
    assert abs(started.count("busy") - 10) <= 1


@pytest.mark.parametrize("num_served", [0, 1, 50])
def test_a_flood_delays_another_tenant_by_one_request_only(num_served):
    policy = filled(make("fair"), [FakeGroup(order, tenant="flood", num_tokens=100) for order in range(1000)])
    for _ in range(num_served):
        serve(policy, start_next(policy))
    policy.add(FakeGroup(1000, tenant="other"))
    started = []
    for _ in range(2):
        group = start_next(policy)
        started.append(group.tenant)
        serve(policy, group)
    assert started == ["flood", "other"]


def test_new_tenants_do_not_overtake_one_that_waits_at_the_same_counter():
    policy = filled(make("fair"), [FakeGroup(0, tenant="z"), FakeGroup(1, tenant="a")])
    assert start_next(policy).tenant == "z"


@pytest.mark.essential
def test_the_tenant_served_most_is_preempted_first():
    a, b = FakeGroup(0, tenant="a"), FakeGroup(1, tenant="b")
    policy = filled(make("fair"), [a, b])
    policy.remove(a)
    policy.remove(b)
    policy.charge(a, 5)
    policy.charge(b, 6)
    assert policy.rank(b) > policy.rank(a)


def test_a_debt_outlives_idleness():
    policy = filled(make("fair"), [FakeGroup(order, tenant="a") for order in range(3)])
    policy.add(debtor := FakeGroup(10, tenant="b"))
    policy.remove(debtor)
    policy.charge(debtor, 25)  # `a` still stands at 0
    policy.forget(debtor)
    policy.add(FakeGroup(11, tenant="b"))
    started = []
    for _ in range(4):
        group = start_next(policy)
        started.append(group.tenant)
        serve(policy, group)
    assert started == ["a", "a", "a", "b"]


def test_who_was_served_while_alone_owes_nothing_afterwards():
    policy = make("fair")
    for order in range(10):
        policy.add(FakeGroup(order, tenant="alone"))
        serve(policy, start_next(policy))
    filled(policy, [FakeGroup(10 + order, tenant="new") for order in range(10)])
    filled(policy, [FakeGroup(20 + order, tenant="alone") for order in range(10)])
    started = []
    for _ in range(6):
        group = start_next(policy)
        started.append(group.tenant)
        serve(policy, group)
    assert started == ["new", "alone"] * 3


def test_tenants_without_debt_are_dropped_when_they_leave():
    policy = make("fair")
    for order in range(100):
        policy.add(FakeGroup(order, tenant=str(order)))
        serve(policy, start_next(policy))
    assert not policy._tenants


def test_only_the_largest_debts_are_kept(monkeypatch):
    monkeypatch.setattr(policy_module, "_MAX_IDLE_TENANTS", 4)
    policy = make("fair")
    policy.add(FakeGroup(0, tenant="waits"))  # keeps the floor at 0, so that all others are in debt
    for order in range(1, 100):
        group = FakeGroup(order, tenant=str(order), num_tokens=order)
        policy.add(group)
        policy.remove(group)
        serve(policy, group)
    assert sorted(policy._tenants) == ["96", "97", "98", "99", "waits"]


def test_tokens_of_a_forgotten_request_are_refused():
    policy = make("fair")
    policy.add(group := FakeGroup(0, tenant="a"))
    policy.remove(group)
    policy.add(FakeGroup(1, tenant="a"))
    policy.forget(group)
    with pytest.raises(KeyError, match="forgotten"):
        policy.charge(group, 1)


def test_longest_prefix_hit_first_and_what_is_swapped_out_is_a_full_hit():
    groups = [FakeGroup(0), FakeGroup(1, hit=8), FakeGroup(2, hit=20, num_tokens=30), FakeGroup(3, hit=8)]
    swapped = FakeGroup(4, num_tokens=19, swapped=True)
    assert orders(filled(make("prefix"), [*groups, swapped])) == [2, 4, 1, 3, 0]


def test_no_request_waits_for_longer_hits_beyond_the_delay():
    policy = make("prefix", prefix_max_delay_s=2.0)
    filled(policy, [FakeGroup(0, arrival=0.0), FakeGroup(1, arrival=0.5), FakeGroup(2, arrival=1.0, hit=10)])
    assert orders(policy, 2.0) == [2, 0, 1]
    assert orders(policy, 2.1) == [0, 2, 1]
    assert orders(policy, 2.6) == [0, 1, 2]


def test_prefix_hits_are_looked_up_in_a_bounded_window():
    policy = filled(make("prefix"), [FakeGroup(order, hit=order) for order in range(100)])
    assert orders(policy) == [*range(63, -1, -1), *range(64, 100)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("every", [1, 3])
def test_a_pass_yields_a_long_queue_while_requests_are_removed(name, every):
    policy = filled(make(name), [FakeGroup(order, tenant=str(order % 300)) for order in range(600)])
    seen = []
    for group in policy.candidates(0.0):
        seen.append(group.order)
        if group.order % every == 0:
            policy.remove(group)
    assert sorted(seen) == list(range(600))
    assert sorted(orders(policy)) == [order for order in range(600) if order % every]


@pytest.mark.parametrize("name", POLICIES)
def test_removing_what_is_not_queued_raises(name):
    policy = make(name)
    group = FakeGroup(0)
    with pytest.raises(KeyError):
        policy.remove(group)
    policy.add(group)
    with pytest.raises(KeyError, match="request '0' is not queued"):
        policy.remove(FakeGroup(0))
    assert group in policy


def test_an_unknown_policy_names_the_nearest_and_the_allowed_ones():
    with pytest.raises(ConfigError) as error:
        make("fcsf")
    assert str(error.value) == "scheduling_policy='fcsf', did you mean 'fcfs'? (allowed: fcfs, priority, fair, prefix)"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("priority", {"priority_aging_s": 0.0}),
        ("priority", {"priority_aging_s": float("nan")}),
        ("prefix", {"prefix_max_delay_s": -1.0}),
        ("fair", {"tenant_weights": {"a": 0.0}}),
        ("fair", {"tenant_weights": {"a": float("inf")}}),
        ("fair", {"tenant_weights": {"a": float("nan")}}),
        ("fair", {"tenant_weights": {"a": "2"}}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        make(name, **fields)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_counts_what_is_queued(name):
    groups = [FakeGroup(order, tenant="ab"[order % 2]) for order in range(4)]
    policy = filled(make(name), groups)
    assert len(policy) == 4
    policy.remove(groups[2])
    assert len(policy) == 3


@pytest.mark.essential
@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(POLICIES),
    fields=st.lists(
        st.tuples(st.floats(0, 5), st.integers(-3, 3), st.sampled_from("abc"), st.integers(0, 30), st.booleans()),
        min_size=1,
        max_size=20,
    ),
    actions=st.lists(st.tuples(st.sampled_from(["toggle", "start", "charge", "leave"]), st.integers(0, 19))),
)
def test_every_policy_yields_each_queued_request_once(name, fields, actions):
    groups = [FakeGroup(order, *values) for order, values in enumerate(fields)]
    policy, queued, running = make(name), set(), set()
    for action, index in actions:
        group = groups[index % len(groups)]
        if action == "start":
            for candidate in policy.candidates(3.0):
                policy.remove(candidate)
                queued.remove(candidate)
                running.add(candidate)
                if len(running) % 3 == 0:
                    break
        elif action == "charge" and group in running:
            policy.charge(group, index)
        elif action == "leave" and group in running:
            running.remove(group)
            policy.forget(group)
        elif action == "toggle" and group in queued:
            queued.remove(group)
            policy.remove(group)
            running.add(group)
        elif action == "toggle":
            running.discard(group)
            queued.add(group)
            policy.add(group)
        assert sorted(orders(policy, 3.0)) == sorted(group.order for group in queued)
        assert len(policy) == len(queued)
        assert all((group in policy) == (group in queued) for group in groups)
