"""What the plan of a step contains, which requests wait, and what is recorded of those that start."""

import pytest

from quire.common.batch import Batch
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.kv.prefix_cache.content_hash import ContentKey

from .fake import Harness

RUNNING, WAITING = SequenceStatus.RUNNING, SequenceStatus.WAITING


def lens(batch: Batch) -> dict[int, int]:
    """By sequence id, in the order of the batch, how many tokens are computed."""
    return {scheduled.seq_id: len(scheduled.token_ids) for scheduled in batch.sequences}


def step_with(harness: Harness, *groups: SequenceGroup) -> Batch:
    """A step in which only these requests may run."""
    batch = harness.scheduler.schedule(set(groups))
    harness.committer.commit(batch, harness.executor.execute(batch))
    harness.requests.check_integrity()
    return batch


def test_steps_are_numbered_from_one():
    harness = Harness()
    harness.add([1] * 3, 3)
    assert harness.scheduler.num_steps == 0
    assert [harness.step().step for _ in range(3)] == [1, 2, 3]


def test_a_sequence_in_a_batch_in_flight_is_not_scheduled_again():
    harness = Harness()
    group = harness.add([1] * 3, 3)
    first, second = harness.scheduler.schedule(), harness.scheduler.schedule()
    assert (lens(first), lens(second)) == ({0: 3}, {})
    harness.committer.commit(first, harness.executor.execute(first))
    assert lens(harness.scheduler.schedule()) == {group.seqs[0].seq_id: 1}


# Budgets


def test_the_time_of_a_step_is_a_limit_for_its_tokens():
    harness = Harness(num_blocks=200, max_num_batched_tokens=400, target_step_ms=100)
    harness.scheduler.step_time.observe(100, 0.1)
    harness.add([1] * 300, 1)
    assert harness.step().num_tokens == 100


def test_a_prompt_that_comes_first_gets_one_token_where_decodes_could_use_all_of_them():
    harness = Harness(num_blocks=20, max_num_batched_tokens=2, policy="priority")
    samples, prompt = harness.add([1], 8, n=2, priority=1), harness.add([2] * 9, 1, priority=0)
    step_with(harness, prompt)
    step_with(harness, samples)
    for _ in range(3):
        assert lens(harness.step()) == {1: 1, 0: 1}, "not two tokens, which would leave none to the samples"
    harness.run()
    for group in (samples, prompt):
        harness.check_output(group)


def test_samples_further_back_wait_for_the_next_step_when_no_tokens_are_left():
    harness = Harness(num_blocks=20, max_num_batched_tokens=4, policy="priority")
    samples = harness.add([1] * 2, 6, n=3, priority=1)
    harness.step()
    first = harness.add([2], 5, n=2)
    assert lens(harness.step()) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert list(lens(harness.step()).values()) == [1] * 4, "two of the first, and two of the three samples"
    assert [seq.num_output_tokens for seq in first.seqs] == [2, 2]
    assert [seq.num_output_tokens for seq in samples.seqs] == [3, 3, 2]
    harness.run()
    for group in (first, samples):
        harness.check_output(group)


def test_samples_that_wait_for_their_prompt_count_as_sequences_that_run():
    harness = Harness(num_blocks=20, max_num_batched_tokens=8, max_num_seqs=4)
    samples, pair, single = harness.add([1] * 9, 3, n=3), harness.add([2], 3, n=2), harness.add([3], 3)
    harness.step()
    assert lens(harness.step()) == {0: 1}, "3 + 2 would be more than 4, and no request overtakes another"
    assert [group.seqs[0].status for group in (samples, pair, single)] == [RUNNING, WAITING, WAITING]


def test_a_request_that_is_only_scored_counts_as_one_sequence():
    harness = Harness(num_blocks=20, max_num_batched_tokens=8, max_num_seqs=2)
    for token_id in (1, 2):
        harness.add_scored([token_id] * 4, [token_id] * 9)
    harness.step()
    assert lens(harness.step()) == {0: 4, 1: 4}


@pytest.mark.parametrize(("n", "starts"), [(1, True), (2, False)])
def test_a_sample_that_was_preempted_keeps_its_place_among_the_sequences_that_run(n, starts):
    harness = Harness(num_blocks=40, max_num_seqs=4)
    samples = harness.add([1] * 5, 8, n=3)
    harness.step()
    for seq in samples.seqs[1:]:
        harness.scheduler.preemptor.pause(samples, seq)
    late = harness.add([2], 3, n=n)
    harness.step()
    assert (late.seqs[0].status is not WAITING) == starts


@pytest.mark.parametrize(("num_running", "starts"), [(1, False), (0, True)])
def test_a_request_that_comes_back_from_the_host_tier_counts_with_all_its_samples(num_running, starts):
    harness = Harness(num_blocks=40, num_host_blocks=40, max_num_seqs=3, preemption_mode="swap")
    for token_id in range(num_running):
        harness.add([token_id], 8)
    samples = harness.add([5] * 5, 8, n=2)
    harness.step()
    harness.scheduler.preemptor.preempt(samples)
    late = harness.add([6], 8)
    harness.step()
    assert [seq.status for seq in samples.seqs] == [RUNNING] * 2
    assert (late.seqs[0].status is RUNNING) == starts


@pytest.mark.parametrize(("max_num_batched_tokens", "is_restarted"), [(1, False), (2, True)])
def test_a_sample_that_was_preempted_starts_again_with_the_tokens_that_are_left(max_num_batched_tokens, is_restarted):
    harness = Harness(num_blocks=20, max_num_batched_tokens=max_num_batched_tokens)
    group = harness.add([1], 6, n=2)
    harness.step()
    harness.scheduler.preemptor.pause(group, group.seqs[1])
    assert list(lens(harness.step()).values()) == [1] * max_num_batched_tokens
    assert (group.seqs[1].status is RUNNING) == is_restarted
    harness.run()
    harness.check_output(group)


# The order


def test_the_request_with_the_longest_cached_prefix_starts_first():
    harness = Harness(num_blocks=40, max_num_batched_tokens=64, policy="prefix", prefix_max_delay_s=1000)
    salted = ContentKey(cache_salt="salt")
    harness.add([1] * 13, 1)
    harness.add([2] * 13, 1, salted)
    harness.run()
    nothing = harness.add([3] * 14, 4)
    scored = harness.add([*[1] * 12, 4, 4], 4, prompt_logprobs=0)  # its prompt has to be computed again
    other_key = harness.add([*[2] * 8, 5, 5], 4)
    some = harness.add([*[1] * 4, 6, 6], 4)
    most = harness.add([*[2] * 8, 7, 7], 4, salted)
    order = [most, some, nothing, scored, other_key]
    assert list(lens(harness.step())) == [group.seqs[0].seq_id for group in order]
    harness.run()
    for group in order:
        harness.check_output(group)


def test_requests_that_have_waited_too_long_start_before_longer_prefixes():
    harness = Harness(num_blocks=40, max_num_batched_tokens=16, policy="prefix", prefix_max_delay_s=2, max_num_seqs=1)
    harness.add([1] * 9, 4)
    harness.step()
    old = harness.add([2] * 9, 1)
    for _ in range(2):
        harness.step()
    fresh = harness.add([*[1] * 8, 2], 1)
    harness.run()
    assert old.metrics.first_scheduled_time < fresh.metrics.first_scheduled_time


def test_the_tenant_that_was_served_least_comes_first_in_each_step():
    harness = Harness(num_blocks=40, max_num_batched_tokens=8, policy="fair")
    harness.add([1] * 6, 9, tenant="a")
    harness.add([2] * 30, 9, tenant="b")
    assert lens(harness.step()) == {0: 6, 1: 2}
    assert list(lens(harness.step()).items()) == [(1, 7), (0, 1)], "b was served 2 tokens, a 6"
    assert list(lens(harness.step()).items()) == [(0, 1), (1, 7)], "b was served 9 tokens, a 7"


def test_the_tokens_of_a_prompt_that_are_to_be_scored_are_computed_even_where_they_are_cached():
    harness = Harness(num_blocks=40)
    harness.add([1] * 9, 1)
    harness.run()
    group = harness.add([1] * 9, 1, prompt_logprobs=0)
    assert lens(harness.step()) == {group.seqs[0].seq_id: 9}


def test_requests_that_may_not_run_do_not_keep_others_from_starting():
    harness = Harness(num_blocks=20)
    first, second = harness.add([1] * 3, 3), harness.add([2] * 3, 3)
    assert lens(step_with(harness, second)) == {1: 3}
    assert lens(harness.step()) == {1: 1, 0: 3}
    assert first.seqs[0].status is RUNNING


def test_a_request_that_waits_for_a_prefix_does_not_keep_others_from_starting():
    harness = Harness(num_blocks=40, max_num_batched_tokens=12)
    owner = harness.add([1] * 16, 3)
    step_with(harness, owner)
    same, other = harness.add([1] * 17, 3), harness.add([3] * 4, 3)
    assert lens(step_with(harness, same, other)) == {other.seqs[0].seq_id: 4}
    assert same.seqs[0].status is WAITING


def test_a_request_that_fits_does_not_overtake_one_that_waits_for_blocks():
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    harness.add([1] * 9, 4)
    harness.step()
    large, small = harness.add([2] * 16, 1), harness.add([3] * 2, 1)
    harness.step()
    assert [group.seqs[0].status for group in (large, small)] == [WAITING] * 2
    harness.run()
    assert large.metrics.finished_time <= small.metrics.finished_time


def test_a_text_that_must_run_whole_waits_for_a_step_with_room_and_is_not_overtaken():
    harness = Harness(num_blocks=20, max_num_batched_tokens=8)
    first, second, third = (harness.add_pooled([1] * num_tokens, is_whole=True) for num_tokens in (6, 5, 1))
    assert lens(harness.scheduler.schedule()) == {first.seqs[0].seq_id: 6}
    assert lens(harness.scheduler.schedule()) == {second.seqs[0].seq_id: 5, third.seqs[0].seq_id: 1}


def test_a_request_that_never_fits_does_not_keep_others_from_starting():
    harness = Harness(num_blocks=3)
    too_long, fine = harness.add([1] * 13), harness.add([2] * 3, 2)
    batch = harness.step()
    assert (batch.ignored, lens(batch)) == ((too_long.request_id,), {fine.seqs[0].seq_id: 3})


def test_a_request_that_comes_back_from_the_host_tier_does_not_keep_others_from_starting():
    harness = Harness(num_blocks=20, num_host_blocks=20, preemption_mode="swap")
    swapped = harness.add([1] * 5, 3)
    harness.step()
    harness.scheduler.preemptor.preempt(swapped)
    late = harness.add([2] * 3, 3)
    assert lens(harness.step()) == {swapped.seqs[0].seq_id: 1, late.seqs[0].seq_id: 3}


def test_all_samples_of_a_preempted_request_start_again_in_one_step():
    harness = Harness(num_blocks=20, preemption_mode="recompute")
    group = harness.add([1] * 5, 6, n=3)
    harness.step()
    harness.scheduler.preemptor.preempt(group)
    assert [seq.status for seq in group.seqs] == [WAITING] * 3
    assert len(harness.step().sequences) == 3
    harness.run()
    harness.check_output(group)


# What is recorded


def test_swapped_blocks_are_counted_in_both_directions():
    harness = Harness(num_blocks=20, num_host_blocks=20, preemption_mode="swap")
    group = harness.add([1] * 9, 6)
    harness.step()
    assert harness.scheduler.num_swapped_blocks == 0
    for total in (6, 12):
        harness.scheduler.preemptor.preempt(group)
        harness.step()
        assert harness.scheduler.num_swapped_blocks == total, "3 blocks out and back"


def test_the_view_learns_which_requests_start_start_again_and_come_back():
    harness = Harness(num_blocks=20, num_host_blocks=20)
    harness.requests.journal = journal = []
    first, second = harness.add([1] * 5, 6), harness.add([2] * 5, 6)
    harness.step()
    assert journal == [("started", first), ("started", second)]
    harness.scheduler.preemptor.preempt(first)
    harness.scheduler.preemptor.pause(second, second.seqs[0])
    del journal[:]
    harness.step()
    assert journal == [("restarted", second), ("swapped in", first)]


def test_the_times_of_the_start_and_of_the_end_in_planning_are_recorded():
    harness = Harness(num_blocks=3)
    first, too_long = harness.add([1] * 3, 6), harness.add([1] * 13)
    for _ in range(2):
        harness.step()
    harness.scheduler.preemptor.preempt(first)
    harness.step()
    assert first.metrics.first_scheduled_time == 1.0, "that it starts again does not count"
    assert too_long.metrics.finished_time == 1.0


def test_copies_between_the_tiers_cost_nothing_unless_their_time_is_given():
    harness = Harness(num_blocks=20, num_host_blocks=20)
    group = harness.add([1] * 9, 6)
    harness.step()
    harness.scheduler.step_time.observe(10, 0.1)
    estimate = harness.scheduler.preemptor.estimate(group)
    assert (estimate.by_swap, estimate.cost_s) == (True, 0.0)
