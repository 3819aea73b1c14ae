"""Which requests run while the one that makes steps fail is searched for, and when it is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.step.containment import FailureIsolator
from tests.effort import examples


class Group:
    """A request, as far as the search knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_finished = False

    def __repr__(self) -> str:
        return self.name


A, B, C, D, E, F = groups = [Group(name) for name in "abcdef"]


@pytest.fixture(autouse=True)
def unfinished() -> None:
    for group in groups:
        group.is_finished = False


def after(*failures: list[Group]) -> FailureIsolator:
    """An isolator that has seen these steps fail."""
    isolator = FailureIsolator()
    for failed in failures:
        assert isolator.failed(failed) is None
    return isolator


def with_candidate(*others: Group) -> FailureIsolator:
    """The first request has failed twice alone, while there were no others or these."""
    isolator = after([A], [A])
    assert isolator.candidates == [A]
    assert isolator.to_run([A, *others]) == ({*others} or {A})
    return isolator


def test_all_run_until_two_steps_have_failed():
    isolator = FailureIsolator()
    assert isolator.to_run([A, B]) is None
    assert isolator.failed([A, B]) is None
    assert isolator.to_run([A, B]) is None, "the first failure may be chance"
    isolator.succeeded(has_run=True)
    assert isolator.failed([A, B]) is None
    assert isolator.to_run([A, B]) is None, "the one before the success does not count"
    isolator.failed([A, B])
    assert isolator.to_run([A, B]) == {A}


def test_each_failure_halves_the_requests_that_run():
    isolator = after([A, B, C, D, E], [A, B, C, D, E])
    assert isolator.to_run(groups) == {A, B}
    assert isolator.failed([A, B]) is None
    assert isolator.to_run(groups) == {A}
    assert isolator.failed([A]) is None
    assert isolator.candidates == [A]
    assert isolator.to_run(groups) == {B, C, D, E, F}


def test_after_a_success_it_is_one_of_those_that_waited():
    isolator = after([A, B, C, D, E], [A, B, C, D, E])
    isolator.succeeded(has_run=True)
    assert isolator.to_run(groups) == {C}
    isolator.succeeded(has_run=True)
    assert isolator.to_run(groups) == {D}
    assert isolator.failed([D]) is None
    assert (isolator.candidates, isolator.to_run(groups)) == ([D], {A, B, C, E, F})


def test_a_failure_that_does_not_come_back_has_no_culprit():
    isolator = after([A, B], [A, B])
    for name in (A, B):
        assert isolator.to_run(groups) == {name}
        isolator.succeeded(has_run=True)
    assert isolator.to_run(groups) is None
    assert isolator.candidates == []


def test_requests_that_have_finished_meanwhile_are_not_searched():
    isolator = after([A, B, C], [A, B, C])
    assert isolator.to_run(groups) == {A}
    B.is_finished = True
    isolator.succeeded(has_run=True)
    assert isolator.to_run(groups) == {C}


def test_a_candidate_that_fails_again_after_a_success_without_it_is_the_culprit():
    isolator = with_candidate(B, C)
    isolator.succeeded(has_run=True)
    assert isolator.to_run([A, B, C]) == {A}
    assert isolator.failed([A]) is A
    assert (isolator.candidates, isolator.to_run([B, C])) == ([], None)


def test_a_candidate_that_succeeds_alone_is_none_any_more():
    isolator = with_candidate(B, C)
    isolator.succeeded(has_run=True)
    assert isolator.to_run([A, B, C]) == {A}
    isolator.succeeded(has_run=True)
    assert (isolator.candidates, isolator.to_run([A, B, C])) == ([], None)


def test_a_candidate_is_tried_when_no_other_request_is_left():
    isolator = with_candidate()
    assert isolator.failed([A]) is A
    assert isolator.to_run([]) is None


def test_a_step_without_requests_says_nothing_of_a_candidate_that_is_tried():
    isolator = with_candidate()
    assert isolator.failed([]) is None
    assert isolator.candidates == [A]
    assert isolator.to_run([A]) == {A}
    assert isolator.failed([A]) is A


def test_candidates_are_tried_one_at_a_time():
    isolator = with_candidate(B, C)
    for _ in range(2):
        assert isolator.failed([B, C]) is None
    assert isolator.to_run([A, B, C]) == {C}, "the other half first, since the first candidate came from the beginning"
    assert isolator.failed([C]) is None
    assert isolator.candidates == [A, C]
    assert isolator.to_run([A, B, C]) == {B}
    isolator.succeeded(has_run=True)
    assert isolator.to_run([A, B, C]) == {A}
    assert isolator.failed([A]) is A
    assert isolator.to_run([B, C]) == {C}
    isolator.succeeded(has_run=True)
    assert isolator.to_run([B, C]) is None


def test_the_half_is_taken_from_either_end_in_turn():
    isolator = with_candidate(B, C, D, E, F)
    for _ in range(2):
        assert isolator.failed([B, C, D, E, F]) is None
    assert isolator.to_run(groups) == {E, F}
    assert isolator.failed([E, F]) is None
    assert isolator.to_run(groups) == {F}
    assert isolator.failed([F]) is None
    assert isolator.to_run(groups) == {B, C, D, E}
    for _ in range(2):
        assert isolator.failed([B, C, D, E]) is None
    assert isolator.to_run(groups) == {B, C}


def test_a_success_of_one_half_tries_the_other_half_before_a_candidate():
    isolator = with_candidate(B, C, D, E)
    for _ in range(2):
        assert isolator.failed([B, C, D, E]) is None
    assert isolator.to_run([A, B, C, D, E]) == {D, E}
    isolator.succeeded(has_run=False)
    assert isolator.to_run([A, B, C, D, E]) == {C}, "no request ran that shows that the engine works"


def test_a_step_in_which_no_request_ran_is_enough_to_try_a_candidate_where_all_others_may_run():
    isolator = with_candidate(B)
    isolator.succeeded(has_run=False)
    assert isolator.to_run([A, B]) == {A}


def test_consecutive_failures_are_those_of_single_requests_and_of_steps_without_any():
    isolator = after([A, B], [A, B])
    assert isolator.num_consecutive_failures == 0
    isolator.failed([A])
    assert isolator.num_consecutive_failures == 1
    isolator.failed([])
    assert isolator.num_consecutive_failures == 2
    isolator.succeeded(has_run=False)
    assert isolator.num_consecutive_failures == 2
    isolator.succeeded(has_run=True)
    assert isolator.num_consecutive_failures == 0


@pytest.mark.essential
@settings(max_examples=examples(300), deadline=None)
@given(num=st.integers(1, 40), bad=st.sets(st.integers(0, 39)), flaky=st.sets(st.integers(0, 60), max_size=20))
def test_candidates_are_cleared_or_found(num, bad, flaky):
    """Steps fail with a bad request in them, or by chance. All bad ones are ended, others only by chance that strikes
    them alone twice, and no request waits for ever."""
    groups = [Group(str(i)) for i in range(num)]
    bad_groups = {group for i, group in enumerate(groups) if i in bad}
    isolator, alive, ended, num_runs = FailureIsolator(), list(groups), [], dict.fromkeys(groups, 0)
    for step in range(40 * 12):
        to_run = isolator.to_run(alive)
        batch = [group for group in alive if to_run is None or group in to_run]
        if batch and (bad_groups & set(batch) or step in flaky):
            candidate = set(isolator.candidates)
            if (found := isolator.failed(batch)) is not None:
                assert batch == [found], "ended without having been alone"
                assert found in candidate, "ended at once"
                alive.remove(found)
                ended.append(found)
        else:
            for group in batch:
                num_runs[group] += 1
            isolator.succeeded(has_run=bool(batch))
    assert not bad_groups & set(alive)
    assert flaky or set(ended) == bad_groups
    assert all(num_runs[group] > 0 for group in alive)
