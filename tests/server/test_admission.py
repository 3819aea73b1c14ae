"""Who may start a request, by an injected clock."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.config import ServerArgs
from quire.server.operations.admission import MAX_RETRY_AFTER_S, Admission, Bucket, _Tenant, tenant_of_address
from quire.server.serve import num_waiting


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    num_waiting = 0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def admission(clock, engine):
    """With these arguments."""

    def make(max_num_seqs: int = 2, **args) -> Admission:
        return Admission(
            ServerArgs(**args), max_num_seqs=max_num_seqs, num_waiting=lambda: engine.num_waiting, clock=clock
        )

    return make


@pytest.mark.essential
def test_the_queue_is_bounded(admission):
    gate = admission(max_num_seqs=2, max_waiting=3)
    assert [gate.enter("a") for _ in range(5)] == [None] * 5
    refusal = gate.enter("a")
    assert refusal.reason == "queue_full"
    assert gate.num_refused == {"queue_full": 1}
    gate.leave("a", 10)
    assert gate.enter("b") is None


def test_the_engines_own_queue_counts_too(admission, engine):
    gate = admission(max_num_seqs=2, max_waiting=3)
    engine.num_waiting = 3  # one request of several prompts
    assert gate.enter("a").reason == "queue_full"
    engine.num_waiting = 2
    assert gate.enter("a") is None


def test_without_a_queue_there_is_still_room_to_run(admission, engine):
    gate = admission(max_num_seqs=2, max_waiting=0)
    assert [gate.enter("a"), gate.enter("a")] == [None, None]
    assert gate.enter("a").reason == "queue_full"
    gate.leave("a", 0)
    engine.num_waiting = 1
    assert gate.enter("a").reason == "queue_full"


def test_retry_after_follows_the_pace(admission, clock):
    gate = admission(max_num_seqs=1, max_waiting=0)
    for _ in range(50):
        assert gate.enter("a") is None
        clock.now += 7
        gate.leave("a", 1)
    assert gate.enter("a") is None
    assert gate.enter("a").retry_after_s == 7
    clock.now += 10_000  # an idle time says nothing
    gate.leave("a", 1)
    assert gate.enter("a") is None
    assert 7 <= gate.enter("a").retry_after_s < MAX_RETRY_AFTER_S


def test_a_tenant_runs_a_limited_number_at_once(admission):
    gate = admission(max_concurrent_per_tenant=2)
    assert [gate.enter("a"), gate.enter("a"), gate.enter("b")] == [None, None, None]
    assert gate.enter("a").reason == "too_many_at_once"
    assert gate.enter("b") is None
    gate.leave("a", 0)
    assert gate.enter("a") is None


def test_requests_per_minute(admission, clock):
    gate = admission(max_num_seqs=1000, requests_per_minute=6)
    assert [gate.enter("a") for _ in range(6)] == [None] * 6
    refusal = gate.enter("a")
    assert (refusal.reason, refusal.retry_after_s) == ("requests_per_minute", 10)
    assert "6 requests per minute" in refusal.message
    assert gate.enter("b") is None
    clock.now += refusal.retry_after_s
    assert gate.enter("a") is None
    assert gate.enter("a") is not None


@pytest.mark.essential
def test_tokens_per_minute_are_paid_back(admission, clock):
    gate = admission(tokens_per_minute=60)
    assert gate.enter("a") is None
    gate.leave("a", 180)
    refusal = gate.enter("a")
    assert (refusal.reason, refusal.retry_after_s) == ("tokens_per_minute", 121)
    clock.now += 120
    assert gate.enter("a") is not None
    clock.now += 1
    assert gate.enter("a") is None


def test_a_refused_request_costs_nothing(admission, clock):
    gate = admission(max_num_seqs=1, max_waiting=0, requests_per_minute=2)
    assert gate.enter("a") is None
    for _ in range(10):
        assert gate.enter("a").reason == "queue_full"
    gate.leave("a", 0)
    assert gate.enter("a") is None
    gate.leave("a", 0)
    assert gate.enter("a").reason == "requests_per_minute"


def test_the_wait_follows_from_the_number_of_requests_ahead(admission, engine):
    """Before two requests have ended, a request is assumed to take a second."""
    gate = admission(max_num_seqs=2, max_waiting=1, max_concurrent_per_tenant=2)
    assert [gate.enter("a"), gate.enter("a"), gate.enter("b")] == [None] * 3
    refusal = gate.enter("a")
    assert (refusal.reason, refusal.retry_after_s) == ("too_many_at_once", 3)
    assert refusal.message.startswith("2 of your requests are running")
    refusal = gate.enter("c")
    assert (refusal.reason, refusal.retry_after_s) == ("queue_full", 1)
    assert refusal.message == "the queue is full: at most 1 requests may wait"
    engine.num_waiting = 5
    assert gate.enter("c").retry_after_s == 5
    assert gate.num_refused == {"too_many_at_once": 1, "queue_full": 2}
    assert gate.num_running == 3


def test_the_pace_is_smoothed(admission, clock):
    gate = admission(max_num_seqs=1, max_waiting=0)
    gate.enter("a")
    gate.leave("a", 0)  # the first end: there is no earlier one to measure from
    assert gate.enter("a") is None
    assert gate.enter("a").retry_after_s == 1
    clock.now += 11
    gate.leave("a", 0)
    assert gate.enter("a") is None
    assert gate.enter("a").retry_after_s == 3, "1 s, and a fifth of the 10 s more"
    clock.now += 3600
    gate.leave("a", 0)
    gate.enter("a")
    assert gate.enter("a").retry_after_s == 15, "3 s, and a fifth of the 57 s to the longest that counts"


def test_a_full_queue_asks_for_a_wait_of_at_most_a_minute(admission, engine):
    gate = admission(max_num_seqs=1, max_waiting=2)
    engine.num_waiting = 500
    assert gate.enter("a").retry_after_s == MAX_RETRY_AFTER_S == 60
    engine.num_waiting = 2
    assert gate.enter("a").retry_after_s == 1


def test_tokens_after_the_end_of_a_request_are_charged(admission, clock):
    gate = admission(tokens_per_minute=60)
    gate.enter("a")
    gate.leave("a", 0)
    gate.charge("a", 61)
    gate.charge("new", 61)
    for tenant in ("a", "new"):
        refusal = gate.enter(tenant)
        assert (refusal.reason, refusal.retry_after_s) == ("tokens_per_minute", 2)
        assert "60 tokens per minute" in refusal.message
    admission().charge("a", 10**9)  # without a limit, nothing is counted


def test_what_is_charged_later_adds_to_what_was_used_before(admission):
    gate = admission(tokens_per_minute=60)
    assert gate.enter("a") is None
    gate.leave("a", 50)
    gate.charge("a", 20)
    assert gate.enter("a").reason == "tokens_per_minute"


def test_the_tenant_that_used_something_longest_ago_is_forgotten_first(admission, monkeypatch):
    monkeypatch.setattr("quire.server.operations.admission.MAX_TENANTS", 2)
    gate = admission(max_num_seqs=1000, tokens_per_minute=60)
    for tenant in ("a", "b"):
        assert gate.enter(tenant) is None
        gate.leave(tenant, 60)
    gate.charge("a", 1)
    assert gate.enter("c") is None
    assert len(gate.tenants) == 2
    assert gate.enter("a").reason == "tokens_per_minute"
    assert gate.enter("b") is None


def test_each_tenant_has_its_own_limits(admission):
    gate = admission(max_num_seqs=100, requests_per_minute=1, tokens_per_minute=10, max_concurrent_per_tenant=1)
    for tenant in ("a", "b"):
        assert gate.enter(tenant) is None
        assert gate.enter(tenant).reason == "too_many_at_once"
        gate.leave(tenant, 10**6)
        assert gate.enter(tenant).reason == "requests_per_minute"


def test_a_bucket_refills_evenly_up_to_its_limit():
    bucket = Bucket(60, 100.0)
    assert bucket.is_full(100.0)
    assert bucket.wait_s(60, 100.0) == 0
    assert bucket.wait_s(61, 100.0) == 1
    bucket.take(60, 100.0)
    assert not bucket.is_full(100.0)
    assert bucket.wait_s(1, 100.0) == 1
    assert bucket.wait_s(30, 110.0) == 20
    assert not bucket.is_full(159.0)
    assert bucket.is_full(160.0)
    assert bucket.wait_s(61, 10_000.0) == 1, "the bucket never holds more than one minute's units"
    bucket.take(90, 10_000.0)
    assert bucket.wait_s(1, 10_000.0) == 31
    bucket.take(60, 20_000.0)
    assert bucket.wait_s(1, 20_000.0) == 1, "it was full again before the second time"


def test_a_tenant_in_debt_is_not_forgotten(admission, clock):
    gate = admission(max_num_seqs=10**6, tokens_per_minute=60)
    gate.enter("debtor")
    gate.leave("debtor", 10**6)
    for number in range(3000):
        gate.enter(f"visitor {number}")
        gate.leave(f"visitor {number}", 0)
    assert gate.enter("debtor").reason == "tokens_per_minute"


def test_tenants_that_use_nothing_are_forgotten(admission, clock):
    gate = admission(max_num_seqs=10**6, requests_per_minute=5)
    assert gate.enter("stays") is None
    for number in range(5000):
        name = f"visitor {number}"
        assert gate.enter(name) is None
        gate.leave(name, 1)
        clock.now += 1
    assert len(gate.tenants) < 30, "of the last 12 s, and those that were not looked at yet"
    gate.leave("stays", 1)
    assert gate.num_running == 0


def test_without_limits_a_tenant_is_kept_only_while_it_runs(admission):
    gate = admission()
    assert gate.enter("a") is None
    assert len(gate.tenants) == 1
    gate.leave("a", 5)
    assert len(gate.tenants) == 0


def test_a_refused_request_leaves_no_tenant_behind(admission, engine):
    gate = admission(max_num_seqs=1, max_waiting=0, requests_per_minute=5)
    engine.num_waiting = 1
    for number in range(100):
        assert gate.enter(f"visitor {number}").reason == "queue_full"
    assert len(gate.tenants) == 0


def test_the_work_of_a_request_does_not_grow_with_the_tenants(admission, monkeypatch):
    """With so many tenants that owe something, each request looks at a fixed number of them."""
    gate, num_looks = admission(max_num_seqs=10**6, requests_per_minute=1), 0
    is_idle = _Tenant.is_idle

    def counted(tenant: _Tenant, now: float) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_idle(tenant, now)

    monkeypatch.setattr(_Tenant, "is_idle", counted)
    for number in range(5000):
        assert gate.enter(f"visitor {number}") is None
        gate.leave(f"visitor {number}", 1)
    assert len(gate.tenants) == 5000, "all of them have used up their minute"
    assert num_looks <= 3 * 5000


def test_memory_is_bounded_and_only_tenants_with_nothing_running_are_forgotten(admission, monkeypatch):
    monkeypatch.setattr("quire.server.operations.admission.MAX_TENANTS", 50)
    gate = admission(max_num_seqs=10**6, requests_per_minute=1)
    assert gate.enter("runs") is None
    for number in range(500):
        assert gate.enter(f"visitor {number}") is None
        gate.leave(f"visitor {number}", 1)
    assert len(gate.tenants) == 50
    assert gate.enter("visitor 499").reason == "requests_per_minute", "the last ones are known"
    assert gate.enter("runs").reason == "requests_per_minute"
    gate.leave("runs", 1)
    assert gate.enter("visitor 0") is None, "the first ones are forgotten"
    for number in range(1000, 1100):  # more run than are kept: none of them may be forgotten
        assert gate.enter(f"visitor {number}") is None
    for number in range(1000, 1100):
        gate.leave(f"visitor {number}", 1)
    gate.leave("visitor 0", 1)
    assert gate.num_running == 0


def test_tokens_of_a_tenant_that_was_forgotten_are_charged(admission):
    gate = admission(tokens_per_minute=60)
    gate.charge("a", 100)
    assert gate.enter("a").reason == "tokens_per_minute"
    unlimited = admission()
    unlimited.charge("a", 100)
    assert len(unlimited.tenants) == 0


@pytest.mark.parametrize(
    ("address", "tenant"),
    [("10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("2001:db8:1:2::", "2001:db8:1:2::/64"),
     ("2001:db8:1:3::", "2001:db8:1:3::/64"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::/64"),
     ("fe80::1%", "fe80::/64"), ("::1", "::/64"), ("local", "local"), ("a:b", "a:b")],
)  # fmt: skip
def test_an_ipv6_client_is_its_network(address, tenant):
    """One client has 2**64 addresses: with an account for each, no limit would hold for it."""
    assert tenant_of_address(address) == tenant


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 12)), max_size=60),
)
def test_no_stretch_of_time_has_more_than_the_limit(limit, visits):
    """Whatever the arrivals: in any stretch of t minutes at most `limit * (1 + t)` were let in."""
    bucket, now, granted = Bucket(limit, 0.0), 0.0, []
    for pause_s, number in visits:
        now += pause_s
        for _ in range(number):
            if bucket.wait_s(1, now) == 0:
                bucket.take(1, now)
                granted.append(now)
    for first, start in enumerate(granted):
        for last, end in enumerate(granted[first:], start=first):
            assert last - first + 1 <= limit * (1 + (end - start) / 60) + 1e-6


@given(st.integers(1, 1000), st.floats(1, 5000), st.floats(0, 100))
def test_after_the_wait_it_is_there(limit, used, pause_s):
    bucket = Bucket(limit, 0.0)
    bucket.take(used, pause_s)
    wait_s = bucket.wait_s(1, pause_s)
    assert bucket.wait_s(1, pause_s + wait_s) < 1e-6


def test_one_request_of_many_texts_fills_no_queue():
    def entry(pooler, waiting):
        stats = SimpleNamespace(num_waiting=waiting)
        return SimpleNamespace(llm=SimpleNamespace(pooler=pooler, stats=lambda: stats))

    asleep, texts, prompts = SimpleNamespace(llm=None), entry("embed", 2000), entry(None, 7)
    assert num_waiting([asleep, texts, prompts]) == 7
    assert num_waiting([texts, prompts, texts]) == 7 + 4000 - 2048
