"""Blocks evicted from the device tier wait in the host tier: found there, copied back, forgotten if the step failed."""

import pytest

from quire.kv.block_space_manager import AllocStatus
from quire.kv.prefix_cache.stats import HitSource, MissReason
from tests.engine.fake import Harness, expected_output

from .managers import end, make_manager, moved, run

FIRST, SECOND = [1] * 16, [2] * 16


@pytest.mark.essential
def test_what_was_spilled_is_hit_with_the_right_content():
    harness = Harness(num_blocks=6, num_host_blocks=8, max_num_batched_tokens=32)
    for prompt in ([1] * 17, [2] * 17):
        harness.add(prompt, 4)
        harness.run()
    again = harness.add([*[1] * 16, 3], 4)
    harness.run()
    harness.check_output(again)
    assert again.num_cached_tokens == 16
    stats = harness.blocks.stats
    assert stats.num_block_hit_tokens[HitSource.HOST] > 0
    assert sum(stats.num_block_hit_tokens.values()) == 16
    assert stats.num_spilled_tokens > 0
    assert (
        sum(len(moved(batch.transfers)[1]) for batch in harness.executor.batches) * 4
        == stats.num_block_hit_tokens[HitSource.HOST]
    )


def test_a_hit_may_begin_on_the_device_and_go_on_in_the_host_tier():
    manager = make_manager(6, num_host_blocks=4)
    run(manager, 0, FIRST)
    end(manager, 0)
    run(manager, 1, SECOND)  # evicts two of the first, the deepest
    end(manager, 1)
    hit = manager.look_up(2, [*FIRST, 3])
    assert (hit.num_blocks, hit.num_ready_blocks) == (4, 2)
    assert hit.num_by_source == {HitSource.DEVICE: 2, HitSource.HOST: 2, HitSource.JOINED: 0}
    assert hit.needs_step


def test_content_for_which_the_host_tier_has_no_room_is_lost():
    manager = make_manager(4, num_host_blocks=2)
    run(manager, 0, FIRST)
    end(manager, 0)
    run(manager, 1, SECOND)
    assert (manager.stats.num_spilled_tokens, manager.stats.num_evicted_tokens) == (8, 8)
    end(manager, 1)
    run(manager, 2, [3] * 16)
    assert (manager.stats.num_spilled_tokens, manager.stats.num_evicted_tokens) == (16, 24), "the oldest were dropped"


def test_content_that_the_host_tier_has_is_not_copied_again():
    manager = make_manager(4, num_host_blocks=8)
    for seq_id, tokens in enumerate((FIRST, SECOND, FIRST, SECOND, FIRST)):
        run(manager, seq_id, tokens)
        end(manager, seq_id)
    assert manager.stats.num_spilled_tokens == 2 * 16


def test_what_leaves_the_device_again_counts_as_used_now_in_the_host_tier():
    manager = make_manager(1, num_host_blocks=3)
    first, second, *others = ([token_id] * 4 for token_id in range(6))
    for seq_id, tokens in enumerate([first, second, others[0], first, others[1]]):
        run(manager, seq_id, tokens)  # evicts the one before, and at the end the first for the second time
        end(manager, seq_id)
    run(manager, 5, others[2])  # for one more the host tier has no room
    end(manager, 5)
    assert manager.look_up(6, [*first, 9]).num_by_source[HitSource.HOST] == 1
    assert manager.look_up(7, [*second, 9]).num_blocks == 0, "the oldest had to go"


def test_nothing_spilled_is_found_after_a_failed_step():
    manager = make_manager(4, num_host_blocks=4)
    run(manager, 0, FIRST)
    end(manager, 0)
    manager.advance()
    manager.allocate(manager.look_up(1, SECOND))
    manager.append(1, 0, 16)
    assert manager.look_up(2, [*FIRST, 3]).num_by_source[HitSource.HOST] == 4, "it comes with the step"
    manager.revert(manager.step)
    manager.check_integrity()
    assert manager.look_up(2, [*FIRST, 3]).num_blocks == 0
    assert manager.take_transfers(manager.step) == ()
    assert manager.tiers.pools[1].num_free_blocks == 4


def test_nothing_spilled_is_found_after_a_step_that_failed_with_its_copies_under_way():
    manager = make_manager(4, num_host_blocks=4)
    run(manager, 0, FIRST)
    end(manager, 0)
    manager.advance()
    manager.allocate(manager.look_up(1, SECOND))
    manager.append(1, 0, 16)
    assert len(manager.take_transfers(manager.step)) == 1
    manager.revert(manager.step)
    manager.check_integrity()
    assert manager.look_up(2, [*FIRST, 3]).num_blocks == 0
    assert manager.tiers.pools[1].num_free_blocks == 4


def test_a_block_behind_the_prefix_does_not_count_as_found():
    """One group's second block is in the host tier, the other's is nowhere."""
    manager = make_manager(4, (None, None), num_host_blocks=1)
    run(manager, 0, [1] * 8)
    lost = manager.block_tables(0)[1][1]
    end(manager, 0)
    manager.pool.forget(lost)
    taken = [manager.pool.allocate() for _ in range(2)]
    hit = manager.look_up(1, [1] * 9)
    assert (hit.num_blocks, hit.num_ready_blocks) == (1, 1)
    assert hit.num_by_source == {HitSource.DEVICE: 1, HitSource.HOST: 0, HitSource.JOINED: 0}
    assert len(taken) == 2
    assert manager.stats.num_spilled_tokens == 4


@pytest.mark.essential
def test_a_host_block_is_not_given_to_others_while_the_step_reads_it():
    manager = make_manager(4, num_host_blocks=4)
    run(manager, 0, FIRST)
    end(manager, 0)
    run(manager, 1, SECOND)
    end(manager, 1)
    manager.advance()
    hit = manager.look_up(2, [*FIRST, 3][:13])
    assert hit.num_by_source[HitSource.HOST] == 3
    manager.allocate(hit)  # which spills three blocks of the second: there is one block of the host tier for them
    swap_out, swap_in = moved(manager.take_transfers(manager.step))
    assert len(swap_in) == 3
    assert not {host for _, host in swap_out} & {host for host, _ in swap_in}
    manager.check_integrity()


def test_a_preempted_request_is_not_counted_twice():
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    groups = [harness.add([i] * 6, 12) for i in range(3)]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > 0
    assert harness.blocks.stats.num_queried_tokens == 3 * 5
    assert harness.blocks.stats.num_missed_tokens[MissReason.NEVER_SEEN] == 3 * 5
    assert [harness.output(g) for g in groups] == [expected_output([i] * 6, 12) for i in range(3)]


def test_samples_that_share_a_last_block_are_swapped_in_only_if_each_can_get_its_own():
    harness = Harness(num_blocks=6, num_host_blocks=6, preemption_mode="swap", max_num_batched_tokens=40)
    groups = [harness.add([7] * 4, 3), harness.add([1] * 18, 3, n=4)]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions_by_swap > 0
    for group in groups:
        harness.check_output(group)


def test_who_waits_in_the_host_tier_needs_no_reserve_on_the_device():
    """The only sequence with blocks is swapped out, and before it comes a request that takes the whole cache."""
    harness = Harness(num_blocks=10, num_host_blocks=10, watermark=0.2, policy="priority", max_num_batched_tokens=64)
    low = harness.add([1] * 8, 4, priority=9)
    harness.step()
    harness.scheduler.preemptor.preempt(low)
    assert low in harness.requests.swapped
    high = harness.add([2] * 37, 2, priority=-9)
    harness.run()
    for group in (low, high):
        harness.check_output(group)


def test_a_swapped_out_sequence_for_which_pins_leave_no_room_is_not_swapped_in():
    manager = make_manager(8, num_host_blocks=8, pinned_fraction=0.5)
    run(manager, 0, [1] * 20)
    manager.advance()
    manager.swap_out([0])
    run(manager, 1, SECOND)
    assert manager.pins.pin(SECOND).num_blocks == 4
    end(manager, 1)
    assert manager.pool.num_free_blocks == 4
    assert not manager.can_swap_in([0], 20)
    assert manager.can_allocate(manager.look_up(2, [3] * 16)) is AllocStatus.OK
