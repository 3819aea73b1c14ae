"""Who may start a request, by an injected clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.config import ServerArgs
from quire.server.operations.admission import MAX_RETRY_AFTER_S, Admission, Bucket


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


def test_a_tenant_runs_only_so_many_at_once(admission):
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


def test_tenants_that_use_nothing_are_forgotten(admission, clock):
    gate = admission(max_num_seqs=10**6, requests_per_minute=5)
    assert gate.enter("stays") is None
    for number in range(5000):
        name = f"visitor {number}"
        assert gate.enter(name) is None
        gate.leave(name, 1)
        clock.now += 1
    assert len(gate._tenants) < 1100
    gate.leave("stays", 1)
    assert gate.num_running == 0


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
