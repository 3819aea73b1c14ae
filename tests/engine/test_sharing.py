"""What several requests have in common is computed once and kept once, whether they come together or not."""

from collections import Counter

import pytest

from quire.engine.requests.sequence import SequenceStatus
from quire.kv.prefix_cache.content_hash import ContentKey
from quire.kv.prefix_cache.stats import HitSource

from .fake import Harness

PREFIX = [index % 7 for index in range(32)]


def num_computed(harness: Harness) -> int:
    """Tokens run through the model in all steps."""
    return sum(batch.num_tokens for batch in harness.executor.batches)


def add_100(harness: Harness) -> list:
    return [harness.add([*PREFIX, 10 + index], 1) for index in range(100)]


def test_100_new_requests_compute_their_prefix_once_within_one_step():
    """All of them join the first one's blocks in the step that computes them."""
    harness = Harness(num_blocks=200, max_num_seqs=100, max_num_batched_tokens=32 + 100)
    groups = add_100(harness)
    batch = harness.step()
    assert len(batch.sequences) == 100
    assert batch.num_tokens == 32 + 100
    assert harness.blocks.stats.num_block_hit_tokens[HitSource.JOINED] == 99 * 32
    assert not harness.requests
    for group in groups:
        harness.check_output(group)


@pytest.mark.essential
def test_100_new_requests_compute_their_prefix_once_over_several_steps():
    """The others wait while the first computes the prefix in chunks, and no longer."""
    harness = Harness(num_blocks=200, max_num_seqs=100, max_num_batched_tokens=10)
    groups = add_100(harness)
    num_seqs = [len(harness.step().sequences) for _ in range(4)]
    assert num_seqs[:3] == [1, 1, 1], "32 tokens, 10 in a step"
    assert num_seqs[3] > 1
    harness.run()
    assert num_computed(harness) == 32 + 100
    for group in groups:
        harness.check_output(group)


def test_without_caching_each_computes_it():
    harness = Harness(num_blocks=900, max_num_seqs=100, max_num_batched_tokens=1000, caching=False)
    add_100(harness)
    harness.run()
    assert num_computed(harness) == 100 * 33


@pytest.mark.parametrize("how", ["abort", "recompute", "swap", "fail"])
def test_who_waits_for_a_prefix_goes_on_when_its_owner_does_not(how):
    mode = how if how in ("recompute", "swap") else None
    harness = Harness(num_blocks=60, num_host_blocks=20, max_num_batched_tokens=8, preemption_mode=mode)
    owner, other = harness.add([*PREFIX, 1], 4), harness.add([*PREFIX, 2], 4)
    harness.step()
    assert [len(s.token_ids) for s in harness.executor.batches[-1].sequences] == [8]
    if how == "abort":
        harness.requests.remove(owner)
    elif how == "fail":
        harness.executor.fail_next = True
        with pytest.raises(RuntimeError, match="planted"):
            harness.step()
    else:
        harness.scheduler.preemptor.preempt(owner)
    harness.run()
    harness.check_output(other)
    if how != "abort":
        harness.check_output(owner)


def test_a_step_that_fails_takes_what_was_joined_back():
    harness = Harness(num_blocks=60, max_num_batched_tokens=100)
    groups = [harness.add([*PREFIX, token_id], 4) for token_id in range(3)]
    harness.executor.fail_next = True
    with pytest.raises(RuntimeError, match="planted"):
        harness.step()
    assert [group.seqs[0].status for group in groups] == [SequenceStatus.RUNNING, *[SequenceStatus.WAITING] * 2]
    assert [group.seqs[0].num_computed_tokens for group in groups] == [0, 0, 0]
    harness.blocks.check_integrity()
    harness.run()
    for group in groups:
        harness.check_output(group)


@pytest.mark.essential
def test_two_that_computed_the_same_end_up_sharing_it():
    """Equal answers to equal prompts are computed side by side: each full block of one is given back."""
    harness = Harness(num_blocks=40, max_num_batched_tokens=100)
    first, second = harness.add(PREFIX, 12), harness.add(PREFIX, 12)
    for _ in range(10):
        harness.step()
    tables = [harness.blocks.block_tables(group.seqs[0].seq_id)[0].tolist() for group in (first, second)]
    num_full = first.seqs[0].num_computed_tokens // 4
    assert num_full > len(PREFIX) // 4
    assert tables[0][:num_full] == tables[1][:num_full]
    assert harness.blocks.num_used_blocks == num_full + 2 * (len(tables[0]) - num_full)
    harness.run()
    for group in (first, second):
        harness.check_output(group)


def test_requests_of_different_keys_share_nothing_side_by_side():
    harness = Harness(num_blocks=60, max_num_batched_tokens=200)
    keys = [ContentKey(cache_salt="a"), ContentKey(cache_salt="b"), ContentKey(lora_id="a")]
    for key in keys * 2:
        harness.add([*PREFIX, 1], 2, key)
    harness.step()
    counts = Counter(
        block for group in harness.groups for block in harness.blocks.block_tables(group.seqs[0].seq_id)[0].tolist()
    )
    assert sorted(counts.values()) == [1] * 6 + [2] * 24, "pairs of one key share eight blocks"
    harness.run()


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
def test_sharing_changes_no_output_where_layers_have_windows(windows):
    harness = Harness(num_blocks=80, windows=windows, max_num_batched_tokens=50)
    groups = [harness.add([*PREFIX, *[token_id] * 3], 9) for token_id in (1, 2, 1, 1)]
    harness.run()
    assert harness.blocks.stats.num_block_hit_tokens[HitSource.JOINED] > 0
    late = harness.add([*PREFIX, 1, 1], 9)
    harness.run()
    assert late.num_cached_tokens >= 32
    for group in [*groups, late]:
        harness.check_output(group)
