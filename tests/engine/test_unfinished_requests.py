"""Where unfinished requests are, and that nothing of a request is kept after its end."""

import pytest

from quire.engine.requests.sequence import SequenceStatus

from .fake import Harness


def swapping(*prompts: list[int]) -> Harness:
    """A harness whose requests are in the host tier, each with these tokens."""
    harness = Harness(num_blocks=12, num_host_blocks=12, max_num_batched_tokens=32, preemption_mode="swap")
    for prompt in prompts:
        harness.add(prompt, 3)
    harness.step()
    for group in harness.groups:
        harness.scheduler.preemptor.preempt(group)
    return harness


def test_requests_in_the_host_tier_are_unfinished_but_do_not_count_as_waiting():
    harness = swapping([1] * 9, [2] * 5)
    harness.add([3] * 4)
    assert (len(harness.requests), harness.requests.num_waiting, len(harness.requests.swapped)) == (3, 1, 2)


@pytest.mark.parametrize("when", ["finished", "removed while queued", "removed while running", "removed while swapped"])
def test_nothing_is_kept_of_a_request_that_has_ended(when, monkeypatch):
    harness = swapping([1] * 9) if when == "removed while swapped" else Harness()
    group = harness.groups[0] if harness.groups else harness.add([1] * 9, 3)
    requests, forgotten = harness.requests, []
    forget = requests.policy.forget
    monkeypatch.setattr(requests.policy, "forget", lambda group: [forgotten.append(group), forget(group)])
    if when != "removed while queued" and when != "removed while swapped":
        harness.step()
    assert harness.blocks.prefixes.chains or when == "removed while queued"
    if when == "finished":
        harness.run()
    else:
        requests.remove(group)
    assert forgotten == [group]
    assert (len(requests), requests.swapped, requests.owners) == (0, set(), {})
    assert harness.blocks.prefixes.chains == {}
    assert harness.blocks.num_used_blocks == 0


def test_a_block_that_is_partly_full_at_the_end_can_be_copied_by_the_next_request():
    harness = Harness()
    first = harness.add([1] * 9, 3)
    harness.run()
    second = harness.add([*first.seqs[0].token_ids[:-1], 49], 1)
    harness.run()
    assert second.num_cached_tokens == 11, "2 blocks of 4, and 3 of the tokens in the third"


def test_a_failed_step_resets_the_requests_that_it_was_to_bring_back_except_an_aborted_one():
    harness = swapping([1] * 9, [2] * 9)
    aborted, fine = harness.groups
    batch = harness.scheduler.schedule()
    assert len(batch.sequences) == 2
    harness.requests.remove(aborted)
    harness.requests.revert(batch.step)
    assert (fine.seqs[0].status, fine.seqs[0].num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert harness.requests.num_waiting == 1
    harness.requests.check_integrity()
    harness.run()
    harness.check_output(fine)


def test_the_earlier_of_two_steps_in_flight_may_fail():
    harness = Harness(num_blocks=12, max_num_batched_tokens=9)
    groups = [harness.add([token] * 9, 3) for token in (1, 2)]
    failing, fine = harness.scheduler.schedule(), harness.scheduler.schedule()
    assert [len(batch.sequences) for batch in (failing, fine)] == [1, 1]
    harness.requests.revert(failing.step)
    harness.committer.commit(fine, harness.executor.execute(fine))
    harness.requests.check_integrity()
    harness.run()
    for group in groups:
        harness.check_output(group)


def test_requests_that_ended_in_the_plans_of_several_failed_steps_are_reported_once():
    harness = Harness(num_blocks=3)
    groups, steps = [], []
    for length in (13, 14):
        groups.append(harness.add([1] * length))
        harness.add([1] * 3, 2)
        steps.append(harness.scheduler.schedule().step)
    harness.requests.revert(steps[1])
    harness.requests.revert(steps[0])
    harness.requests.revert()  # the plan of the next step fails too
    assert harness.scheduler.schedule().ignored == tuple(group.request_id for group in groups)


def test_inconsistent_blocks_are_found():
    harness = Harness()
    harness.add([1] * 9)
    harness.step()
    harness.requests.check_integrity()
    harness.blocks.pool.allocate()
    with pytest.raises(AssertionError):
        harness.requests.check_integrity()
