"""Samples of one prompt: its blocks are shared, each goes its own way, and none is lost where memory is short."""

import pytest

from quire.engine.requests.sequence import SequenceStatus

from .fake import Harness, expected_output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two blocks and one token


def tables(harness: Harness, group) -> list[list[int]]:
    return [harness.blocks.block_tables(seq.seq_id)[0].tolist() for seq in group.unfinished_seqs]


@pytest.mark.essential
def test_samples_share_the_prompt_until_they_diverge():
    harness = Harness(num_blocks=20)
    group = harness.add(PROMPT, 8, n=3)
    harness.step()
    assert harness.blocks.num_used_blocks == 3, "computed once, the half-full block too"
    assert tables(harness, group) == [tables(harness, group)[0]] * 3
    batch = harness.step()
    assert len(batch.copies) == 2, "the last one to write keeps the block"
    assert harness.blocks.num_used_blocks == 2 + 3
    assert len({tuple(table[:2]) for table in tables(harness, group)}) == 1
    assert len({table[2] for table in tables(harness, group)}) == 3
    harness.run()
    harness.check_output(group)
    assert len({tuple(harness.output(group, sample)) for sample in range(3)}) == 3


def test_a_prompt_that_ends_with_a_block_needs_no_copy():
    harness = Harness(num_blocks=20)
    group = harness.add(PROMPT[:8], 8, n=3)
    harness.step()
    assert harness.blocks.num_used_blocks == 2
    assert harness.step().copies == ()
    assert harness.blocks.num_used_blocks == 2 + 3
    harness.run()
    harness.check_output(group)


def test_the_prompt_of_samples_is_computed_once():
    harness = Harness(num_blocks=20, max_num_batched_tokens=4)
    group = harness.add(PROMPT, 3, n=3)
    assert [harness.step().num_tokens for _ in range(3)] == [4, 4, 1]
    harness.run()
    assert sum(batch.num_tokens for batch in harness.executor.batches) == 9 + 3 * 2
    harness.check_output(group)


def test_samples_finish_on_their_own():
    outputs = [expected_output(PROMPT, 8, (None,), sample) for sample in range(3)]
    stop = next(token for token in outputs[1][:-1] if token not in outputs[0] + outputs[2])
    harness = Harness(num_blocks=20)
    group = harness.add(PROMPT, 8, n=3, stop_token_ids=[stop])
    while not any(seq.status.is_finished for seq in group.seqs):
        harness.step()
    assert [seq.status.is_finished for seq in group.seqs] == [False, True, False]
    assert not group.is_finished
    held = {block_id for table in tables(harness, group) for block_id in table}
    assert harness.blocks.num_used_blocks == len(held), "its own blocks are back"
    harness.run()
    assert harness.output(group, 1) == outputs[1][: outputs[1].index(stop) + 1]
    assert group.seqs[1].status is SequenceStatus.FINISHED_STOPPED
    assert [harness.output(group, sample) for sample in (0, 2)] == [outputs[0], outputs[2]]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_aborting_samples_returns_all_blocks(num_steps):
    harness = Harness(num_blocks=20)
    group = harness.add(PROMPT, 8, n=3)
    for _ in range(num_steps):
        harness.step()
    harness.requests.remove(group)
    harness.blocks.check_integrity()
    assert harness.blocks.num_used_blocks == 0
    assert not harness.requests
    assert all(harness.requests.owners.get(seq.seq_id) is None for seq in group.seqs)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_more_samples_than_the_cache_holds_take_turns(num_blocks, caching):
    """At 21 tokens each has six blocks, two of them shared: only some of the five samples fit at once."""
    harness = Harness(num_blocks=num_blocks, caching=caching, max_num_batched_tokens=32)
    group = harness.add(PROMPT, 12, n=5)
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > 0
    harness.check_output(group)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_samples_are_preempted_in_both_ways(mode, windows):
    harness = Harness(
        num_blocks=30, windows=windows, num_host_blocks=40, preemption_mode=mode, max_num_batched_tokens=32
    )
    groups = [harness.add([*PROMPT, token_id], 9, n=n) for token_id, n in ((1, 1), (2, 3), (3, 2))]
    for turn in range(8):
        harness.step()
        harness.scheduler.preemptor.preempt(harness.requests.running[turn % len(harness.requests.running)])
        harness.blocks.check_integrity()
    harness.run()
    assert (harness.scheduler.preemptor.num_preemptions_by_swap > 0) == (mode == "swap")
    for group in groups:
        harness.check_output(group)


@pytest.mark.essential
def test_shared_blocks_are_swapped_once():
    harness = Harness(num_blocks=20, num_host_blocks=20, preemption_mode="swap")
    group = harness.add(PROMPT, 8, n=3)
    for _ in range(2):
        harness.step()
    harness.scheduler.preemptor.preempt(group)
    batch = harness.step()  # brings it back at once
    assert [(t.source_tier, len(t.pairs)) for t in batch.transfers] == [(0, 2 + 3), (1, 2 + 3)]
    harness.run()
    harness.check_output(group)


def test_swapped_samples_that_come_back_share_what_a_step_may_compute():
    harness = Harness(num_blocks=16, num_host_blocks=16, preemption_mode="swap", max_num_batched_tokens=2)
    group = harness.add(PROMPT, 6, n=3)
    while len(group.seqs) < 3:
        harness.step()
    harness.scheduler.preemptor.preempt(group)
    batch = harness.step()
    assert [t.target_tier for t in batch.transfers] == [1, 0]
    assert len(batch.sequences) == 2
    assert [seq.status for seq in group.seqs] == [SequenceStatus.RUNNING] * 3
    harness.run()
    harness.check_output(group)


def test_a_group_waits_until_all_its_samples_may_run():
    harness = Harness(num_blocks=40, max_num_seqs=4)
    first, second = harness.add(PROMPT, 4, n=2), harness.add([1, 2], 4, n=3)
    harness.step()
    assert second.seqs[0].status is SequenceStatus.WAITING
    harness.run()
    for group in (first, second):
        harness.check_output(group)


def test_a_sample_whose_room_is_pinned_while_it_waits_ends_and_the_other_goes_on():
    harness = Harness(num_blocks=12, pinned_fraction=0.9, max_num_batched_tokens=40)
    group = harness.add([9], 40, n=2)
    while group.seqs[0].num_tokens < 29 or group.seqs[0].num_uncomputed_tokens != 1:
        harness.step()
    first, second = group.seqs
    assert second.status is SequenceStatus.WAITING, "it has given way to the first"
    harness.blocks.pins.pin(first.token_ids[:28])
    while harness.requests:
        harness.step()
    assert "of which 7 are pinned" in group.error
    assert harness.output(group, 0) == expected_output([9], 40)
    told = harness.output(group, 1)
    assert 20 < len(told) < 40
    assert told == expected_output([9], 40, sample=1)[: len(told)]
    assert harness.blocks.num_used_blocks == 7
