"""What becomes of requests and of their samples when blocks run out: some are preempted, and some end."""

from quire.engine.requests.sequence import SequenceStatus

from .beams import BeamHarness
from .fake import Harness, expected_output
from .test_planning import lens, step_with

RUNNING, WAITING = SequenceStatus.RUNNING, SequenceStatus.WAITING
CAPPED = SequenceStatus.FINISHED_LENGTH_CAPPED


def with_pins(num_blocks: int = 6) -> Harness:
    """Half of the blocks are pinned."""
    harness = Harness(num_blocks=num_blocks, pinned_fraction=0.5, max_num_batched_tokens=32)
    prefix = [1] * (num_blocks // 2 * 4)
    harness.add(prefix, 1)
    harness.run()
    harness.blocks.pins.pin(prefix)
    return harness


def run_in_steps(harness: Harness) -> list[str]:
    """Until every request has finished; returns the ids of those that ended in planning. Pinned blocks may remain."""
    ended: list[str] = []
    for _ in range(100):
        if not harness.requests:
            return ended
        ended += harness.step().ignored
    raise AssertionError("livelock")


# Preemption


def test_nothing_starts_in_a_step_in_which_a_request_is_preempted():
    harness = Harness(num_blocks=3, policy="priority")
    first, preempted = harness.add([1] * 4, 4), harness.add([2] * 8, 2, priority=1)
    harness.step()
    late = harness.add([3] * 2, 2)
    assert lens(harness.step()) == {first.seqs[0].seq_id: 1}
    assert preempted.metrics.num_preemptions == 1
    assert lens(harness.step()) == {first.seqs[0].seq_id: 1, late.seqs[0].seq_id: 2}, "there is a block for it"
    harness.run()
    for group in (first, preempted, late):
        harness.check_output(group)


def test_several_requests_are_preempted_where_one_does_not_free_enough_blocks():
    harness = Harness(num_blocks=4, max_num_batched_tokens=8)
    first = harness.add([1] * 16, 1)
    harness.step()
    others = [harness.add([token_id] * 4, 4) for token_id in (2, 3)]
    step_with(harness, *others)
    assert lens(harness.step()) == {first.seqs[0].seq_id: 6}, "two blocks' worth"
    assert [group.metrics.num_preemptions for group in others] == [1, 1]
    harness.run()
    for group in (first, *others):
        harness.check_output(group)


def test_the_last_request_is_preempted_itself_when_it_needs_a_block():
    harness = Harness(num_blocks=3)
    first, last = harness.add([1] * 2, 3), harness.add([2] * 8, 3)
    harness.step()
    assert lens(harness.step()) == {first.seqs[0].seq_id: 1}
    assert (last.seqs[0].status, last.seqs[0].num_computed_tokens) == (WAITING, 0)
    assert (first.metrics.num_preemptions, last.metrics.num_preemptions) == (0, 1)
    harness.run()
    for group in (first, last):
        harness.check_output(group)


def test_the_last_sample_is_preempted_itself_when_it_needs_a_block():
    harness = Harness(num_blocks=2)
    group = harness.add([1] * 4, 4, n=2)
    harness.step()
    harness.requests.journal = journal = []
    assert lens(harness.step()) == {group.seqs[0].seq_id: 1}
    assert [seq.status for seq in group.seqs] == [RUNNING, WAITING]
    assert journal == [("preempted", group)]
    harness.run()
    harness.check_output(group)


def test_several_samples_are_preempted_until_one_can_write_into_the_block_that_all_share():
    harness = Harness(num_blocks=3)
    group = harness.add([1] * 9, 3, n=3)
    harness.step()
    harness.requests.journal = journal = []
    batch = harness.step()
    assert (lens(batch), batch.copies) == ({group.seqs[0].seq_id: 1}, ())
    assert [seq.status for seq in group.seqs] == [RUNNING, WAITING, WAITING]
    assert journal == [("preempted", group)] * 2
    harness.run()
    harness.check_output(group)


def test_no_sample_starts_again_in_a_step_in_which_a_request_is_preempted():
    harness = Harness(num_blocks=4)
    samples, other = harness.add([1] * 4, 4, n=2), harness.add([2] * 9, 2)
    harness.step()
    harness.scheduler.preemptor.pause(samples, samples.seqs[1])
    assert lens(harness.step()) == {samples.seqs[0].seq_id: 1}
    assert (samples.seqs[1].status, other.metrics.num_preemptions) == (WAITING, 1)
    assert lens(harness.step()).keys() == {seq.seq_id for seq in samples.seqs}
    harness.run()
    for group in (samples, other):
        harness.check_output(group)


def test_a_sample_that_waits_for_blocks_takes_them_from_no_other_request():
    harness = Harness(num_blocks=4)
    samples, other = harness.add([1] * 2, 6, n=2), harness.add([2] * 9, 3)
    harness.step()
    harness.scheduler.preemptor.pause(samples, samples.seqs[1])
    assert lens(harness.step()) == {samples.seqs[0].seq_id: 1, other.seqs[0].seq_id: 1}
    assert other.metrics.num_preemptions == 0
    harness.run()
    for group in (samples, other):
        harness.check_output(group)


def test_a_beam_that_waits_for_blocks_takes_them_from_a_request_behind_and_nothing_starts_in_that_step():
    """The other beam would wait for it for ever."""
    harness = BeamHarness(num_blocks=5, policy="priority")
    search, other = harness.add_beams([1] * 4, 2, 4), harness.add([2] * 9, 3, priority=1)
    harness.step()
    harness.scheduler.preemptor.pause(search, search.seqs[1])
    late = harness.add([3] * 2, 1)
    assert lens(harness.step()) == {search.seqs[0].seq_id: 1}
    assert (search.metrics.num_preemptions, other.metrics.num_preemptions) == (0, 1)
    assert late.seqs[0].status is WAITING
    harness.run()
    harness.check_beams(search)
    for group in (other, late):
        harness.check_output(group)


def test_a_beam_that_waits_for_blocks_takes_them_from_one_that_waits_for_it():
    harness = BeamHarness(num_blocks=2)
    search = harness.add_beams([1] * 4, 2, 4)
    for _ in range(2):
        harness.step()
    first, second = search.seqs
    assert (first.status, first.num_uncomputed_tokens, second.status) == (RUNNING, 0, WAITING)
    harness.requests.journal = journal = []
    harness.step()
    assert journal == [("preempted", search)]
    assert first.status is WAITING
    harness.run()
    harness.check_beams(search)


# The end


def test_a_sample_that_can_never_start_again_ends_although_another_goes_on():
    harness = Harness(num_blocks=12, pinned_fraction=0.9, max_num_batched_tokens=40)
    group = harness.add([9], 40, n=2)
    first = group.seqs[0]
    while first.num_tokens < 29 or first.num_uncomputed_tokens != 1:
        harness.step()
    second = group.seqs[1]
    assert second.status is WAITING, "it was preempted for the first"
    harness.blocks.pins.pin(first.token_ids[:28])
    assert lens(harness.step()) == {first.seq_id: 1}
    assert second.status is CAPPED


def test_a_request_that_outgrows_the_blocks_that_are_not_pinned_ends_with_a_reason():
    harness = with_pins()
    group = harness.add([2] * 9, 20)
    assert run_in_steps(harness) == [group.request_id]
    assert group.error == (
        "stopped after 4 tokens: 13 tokens and one more do not fit into the 6 blocks of the KV cache, of which 3 are "
        "pinned"
    )
    assert harness.output(group) == expected_output([2] * 9, 4)
    assert group.seqs[0].status is CAPPED
    assert group.metrics.finished_time == float(harness.scheduler.num_steps)
    assert group.metrics.num_preemptions == 0
    assert harness.blocks.num_used_blocks == 3


def test_a_request_whose_samples_outgrow_the_blocks_is_reported_once_when_the_last_has_ended():
    harness = with_pins()
    group = harness.add([2] * 9, 20, n=2)
    while not group.seqs[0].status.is_finished:
        assert harness.step().ignored == ()
    assert not group.seqs[1].status.is_finished
    assert run_in_steps(harness) == [group.request_id]
    for sample, seq in enumerate(group.seqs):
        assert seq.status is CAPPED
        assert harness.output(group, sample) == expected_output([2] * 9, 4, sample=sample)


def test_the_requests_behind_one_that_ends_for_want_of_blocks_run_in_the_same_step():
    harness = Harness(num_blocks=12, pinned_fraction=0.9, max_num_batched_tokens=40)
    samples = harness.add([9], 29, n=2)
    first = samples.seqs[0]
    while first.num_output_tokens < 28:
        harness.step()
    second = samples.seqs[1]
    assert second.status is WAITING, "it was preempted for the first"
    other = harness.add([3], 8)
    harness.step()
    assert first.status is CAPPED
    harness.blocks.pins.pin(first.token_ids[:28])
    batch = harness.step()
    assert (batch.ignored, lens(batch)) == ((samples.request_id,), {other.seqs[0].seq_id: 1})
    assert second.status is CAPPED
    run_in_steps(harness)
    harness.check_output(other)


def test_the_reason_why_a_prompt_never_fits_names_the_pinned_blocks_if_there_are_any():
    harness = with_pins()
    too_long = harness.add([2] * 13, 1)
    assert harness.step().ignored == (too_long.request_id,)
    assert too_long.error == "13 tokens never fit into the KV cache of 24 tokens while 3 of its 6 blocks are pinned"
    harness = Harness(num_blocks=3)
    too_long = harness.add([2] * 13, 1)
    assert harness.step().ignored == (too_long.request_id,)
    assert too_long.error == "13 tokens never fit into the KV cache of 12 tokens"


def test_swapped_samples_that_no_longer_fit_side_by_side_are_computed_again_one_by_one():
    harness = Harness(num_blocks=8, num_host_blocks=8, pinned_fraction=0.7, preemption_mode="swap",
                      max_num_batched_tokens=32)  # fmt: skip
    group = harness.add([1] * 9, 3, n=2)
    for _ in range(2):
        harness.step()
    harness.scheduler.preemptor.preempt(group)
    step_with(harness, harness.add([7] * 20, 1))
    harness.blocks.pins.pin([7] * 20)
    assert lens(harness.step()) == {}, "two samples hold four blocks, and three are left"
    assert [seq.status for seq in group.seqs] == [WAITING] * 2
    assert not harness.requests.swapped
    assert harness.blocks.tiers.pools[1].num_free_blocks == 8
    assert run_in_steps(harness) == []
    harness.check_output(group)
