"""Which batches are planned, submitted and undone while an executor computes several at once."""

import pytest

from quire.engine.step.in_flight import Pipelined, StepsInFlight

from .fake import Harness


class Ahead:
    """Computes several batches at once."""

    def __init__(self, num_in_flight):
        self.num_in_flight = num_in_flight
        self.steps = []
        """Of the batches that were submitted."""

    def submit(self, batch):
        self.steps.append(batch.step)


def running(num_requests):
    """A harness with requests that generate one token in each step."""
    harness = Harness(num_blocks=24)
    for token in range(num_requests):
        harness.add([token, token])
    harness.step()
    assert harness.requests.running == harness.groups
    return harness


def plan(harness, steps, only=None):
    """Plan one more batch; the places of its requests."""
    batch = harness.scheduler.schedule(steps.share(only, harness.groups))
    steps.add(batch)
    return [scheduled.seq_id for scheduled in batch.sequences]


def plan_all(harness, steps, only=None):
    planned = []
    while steps.has_room(only, harness.groups):
        planned.append(plan(harness, steps, only))
    return planned


@pytest.mark.parametrize(
    ("num_in_flight", "planned"),
    [
        (None, [[0, 1, 2, 3, 4]]),
        (1, [[0, 1, 2, 3, 4]]),
        (2, [[0, 1, 2], [3, 4]]),
        (3, [[0, 1], [2, 3], [4]]),
        (4, [[0, 1], [2, 3], [4]]),
        (5, [[0], [1], [2], [3], [4]]),
        (9, [[0], [1], [2], [3], [4]]),
    ],
)
def test_the_running_requests_are_divided_among_the_batches_in_flight(num_in_flight, planned):
    harness = running(5)
    steps = StepsInFlight(harness.requests, harness.executor if num_in_flight is None else Ahead(num_in_flight))
    assert plan_all(harness, steps) == planned


def test_a_request_that_waits_may_begin_in_the_next_batch():
    harness = running(4)
    harness.add([9])
    steps = StepsInFlight(harness.requests, Ahead(3))
    assert plan_all(harness, steps) == [[0, 1, 4], [2, 3]]


def test_a_batch_that_takes_all_others_is_not_limited():
    harness = running(4)
    steps = StepsInFlight(harness.requests, Ahead(2))
    assert plan(harness, steps) == [0, 1]
    assert steps.share(None, harness.groups) is None


def test_no_more_batches_are_planned_than_the_executor_computes_at_once():
    harness = running(4)
    steps = StepsInFlight(harness.requests, Ahead(2))
    assert plan_all(harness, steps) == [[0, 1], [2, 3]]
    harness.add([9])
    assert not steps.has_room(None, harness.groups)


def test_without_requests_one_batch_is_planned():
    harness = Harness()
    steps = StepsInFlight(harness.requests, Ahead(3))
    assert plan_all(harness, steps) == [[]]


def test_while_the_cause_of_a_failure_is_looked_for_one_batch_is_in_flight():
    harness = running(4)
    steps = StepsInFlight(harness.requests, Ahead(3))
    some = {harness.groups[1], harness.groups[2]}
    assert steps.share(some, harness.groups) is some
    assert plan_all(harness, steps, some) == [[1, 2]]
    assert not steps.has_room(set(), harness.groups)


def test_each_batch_is_submitted_once_and_the_oldest_is_executed_next():
    harness = running(6)
    steps = StepsInFlight(harness.requests, executor := Ahead(3))
    assert isinstance(executor, Pipelined)
    plan(harness, steps)
    plan(harness, steps)
    steps.submit()
    assert executor.steps == [2, 3]
    plan(harness, steps)
    steps.submit()
    steps.submit()
    assert executor.steps == [2, 3, 4]
    for step in (2, 3, 4):
        assert steps.oldest.step == step
        batch = steps.oldest
        steps.take()
        harness.committer.commit(batch, harness.executor.execute(batch))
        plan(harness, steps)
        steps.submit()
        assert executor.steps[-1] == step + 3
    assert executor.steps == [2, 3, 4, 5, 6, 7]


def test_a_batch_is_submitted_also_where_none_is_left():
    harness = running(1)
    steps = StepsInFlight(harness.requests, executor := Ahead(2))
    for step in (2, 3, 4):
        assert plan_all(harness, steps) == [[0]]
        steps.submit()
        assert executor.steps[-1] == step
        batch = steps.oldest
        steps.take()
        harness.committer.commit(batch, harness.executor.execute(batch))


def test_an_executor_of_one_batch_at_a_time_gets_nothing_in_advance():
    harness = running(2)
    steps = StepsInFlight(harness.requests, harness.executor)
    for step in (2, 3):
        assert plan_all(harness, steps) == [[0, 1]]
        steps.submit()
        batch = steps.oldest
        assert batch.step == step
        steps.take()
        harness.committer.commit(batch, harness.executor.execute(batch))


def test_after_a_failure_all_batches_are_undone_and_submitted_again():
    harness = running(4)
    steps = StepsInFlight(harness.requests, executor := Ahead(2))
    assert plan_all(harness, steps) == [[0, 1], [2, 3]]
    steps.submit()
    steps.revert()
    assert not harness.requests.busy()
    assert plan_all(harness, steps) == [[0, 1], [2, 3]]
    steps.submit()
    assert executor.steps == [2, 3, 4, 5]
    assert steps.oldest.step == 4


def test_plans_are_undone_in_the_reverse_order(monkeypatch):
    harness = running(4)
    undone, revert = [], harness.requests.revert
    monkeypatch.setattr(harness.requests, "revert", lambda step: [undone.append(step), revert(step)])
    steps = StepsInFlight(harness.requests, Ahead(2))
    plan_all(harness, steps)
    steps.revert()
    assert undone == [3, 2]


def test_the_sequences_of_the_failed_step_are_returned_once():
    harness = running(4)
    steps = StepsInFlight(harness.requests, Ahead(2))
    assert steps.take_failed() == ()
    plan_all(harness, steps)
    assert steps.take_failed() == ()
    steps.revert()
    assert [scheduled.seq_id for scheduled in steps.take_failed()] == [0, 1]
    assert steps.take_failed() == ()
    steps.revert()
    assert steps.take_failed() == (), "nothing was in flight"


def test_a_step_that_is_planned_after_a_failure_has_not_failed():
    harness = running(4)
    steps = StepsInFlight(harness.requests, Ahead(2))
    plan_all(harness, steps)
    steps.revert()
    plan(harness, steps)
    assert steps.take_failed() == ()
