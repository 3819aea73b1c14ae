"""Equal prefixes share blocks and parts of blocks; only computed ones; the least recently used go first."""

import pytest

from quire.common.batch import SlotCopy
from quire.kv.block_space_manager import AllocStatus
from quire.kv.prefix_cache.content_hash import ContentHasher

from .managers import compute, copies, do_step, end, make_manager, run


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_prefix_is_shared_while_its_owner_runs_and_after(num_groups):
    manager = make_manager(16, (None,) * num_groups)
    tokens = list(range(10))
    assert run(manager, 0, tokens) == 0
    assert run(manager, 1, [*tokens[:8], 70, 71]) == 8
    assert manager.block_tables(0)[0][:2].tolist() == manager.block_tables(1)[0][:2].tolist()
    manager.free(0)
    manager.free(1)
    assert manager.num_used_blocks == 0
    assert run(manager, 2, [*tokens[:8], 99, 98]) == 8
    assert manager.stats.num_hit_tokens == 16
    assert manager.stats.num_queried_tokens == 27


def test_what_nothing_holds_can_be_forgotten_in_every_tier():
    manager = make_manager(4, num_host_blocks=4)
    for seq_id, token in enumerate((1, 2, 3)):  # the third evicts the first, whose content goes to the host tier
        run(manager, seq_id, [token] * 8)
        manager.advance()
        if seq_id < 2:
            end(manager, seq_id)
    assert [pool.num_cached_blocks > 0 for pool in manager.tiers.pools] == [True, True]
    manager.forget_cached()
    manager.check_integrity()
    assert [pool.num_cached_blocks for pool in manager.tiers.pools] == [0, 0]
    found = [manager.num_cached_tokens(10 + token, [token] * 9) for token in (1, 2, 3)]
    assert found == [0, 0, 8], "a sequence holds the last"


@pytest.mark.parametrize("length", [8, 9, 10, 12])
def test_a_repeated_prompt_costs_one_token(length):
    manager = make_manager(12)
    tokens = list(range(length))
    run(manager, 0, tokens)
    assert run(manager, 1, tokens) == length - 1


@pytest.mark.essential
@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_longest_common_run_inside_the_next_block_is_copied(num_groups):
    manager = make_manager(24, (None,) * num_groups)
    run(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    run(manager, 1, [1, 2, 3, 4, 5, 9, 9, 9])
    tokens = [1, 2, 3, 4, 5, 6, 7, 0, 0]
    manager.advance()
    assert manager.allocate(manager.look_up(2, tokens)) == 7
    manager.append(2, 7, len(tokens))
    source, copy = manager.block_tables(0)[0][1], manager.block_tables(2)[0][1]
    assert copies(manager, 2)[0] == SlotCopy(0, source, copy, 3)
    assert len(copies(manager, 2)) == num_groups
    assert manager.pool.ref_counts[source] == 2  # held until the copy is done
    do_step(manager, 2)
    manager.publish(2, tokens, 9)
    assert copies(manager, 2) == ()
    assert manager.pool.ref_counts[source] == 1
    manager.check_integrity()


def test_a_sequence_that_ends_before_its_copy_is_done_lets_the_source_go():
    manager = make_manager(12)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    assert manager.allocate(manager.look_up(1, [1, 2, 3, 4, 5, 6, 7])) == 6
    manager.free(1)
    manager.check_integrity()
    manager.free(0)
    assert manager.num_used_blocks == 0


def test_tokens_whose_copy_is_not_done_yet_cannot_be_found():
    """A step failed before the copy ran, and the request is preempted."""
    manager = make_manager(12)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    source = manager.block_tables(0)[0][1]
    assert manager.allocate(manager.look_up(1, [1, 2, 3, 4, 5, 6, 7])) == 6
    manager.publish_tail(1, [1, 2, 3, 4, 5, 6, 7], 6)
    manager.free(1)
    assert manager.allocate(manager.look_up(2, [1, 2, 3, 4, 5, 6, 8])) == 6
    assert [copy.src_block for copy in copies(manager, 2)] == [source]
    manager.check_integrity()


def test_no_tail_is_copied_where_its_source_is_the_last_block_to_spare():
    manager = make_manager(2)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    manager.free(0)
    assert manager.can_allocate(manager.look_up(1, [1, 2, 3, 4, 5, 6, 7])) is AllocStatus.OK
    assert run(manager, 1, [1, 2, 3, 4, 5, 6, 7]) == 4


def test_a_tail_is_copied_where_just_enough_blocks_are_free():
    """One for the copy and one for its source, which is cached without a holder."""
    manager = make_manager(3)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    manager.free(0)
    assert run(manager, 1, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_a_copy_waits_for_another_step_if_its_step_fails():
    manager = make_manager(12)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    manager.advance()
    manager.allocate(manager.look_up(1, [1, 2, 3, 4, 5, 6, 7]))
    planned = copies(manager, 1)
    assert manager.take_copies([1], manager.step) == planned
    manager.revert(manager.step)
    assert copies(manager, 1) == planned
    manager.check_integrity()


def test_only_computed_tokens_of_the_last_block_are_copied():
    manager = make_manager(12)
    manager.allocate(manager.look_up(0, [1, 2, 3, 4, 5, 6, 7]))
    compute(manager, 0, [1, 2, 3, 4, 5, 6, 7], 0, 6)
    manager.publish_tail(0, [1, 2, 3, 4, 5, 6, 7], 6)
    assert run(manager, 1, [1, 2, 3, 4, 5, 6, 7, 8]) == 6
    with pytest.raises(AssertionError, match="has a full block not published"):
        manager.publish_tail(0, [1, 2, 3, 4, 5, 6, 7, 8], 8)


@pytest.mark.parametrize(("num_tokens", "max_tokens", "num_cached"), [(9, None, 8), (9, 99, 8), (8, 99, 4), (9, 5, 4)])
def test_no_more_is_looked_up_than_may_be_and_never_the_last_token(num_tokens, max_tokens, num_cached):
    manager = make_manager(12)
    run(manager, 0, [1] * 12)
    assert manager.num_cached_tokens(1, [1] * num_tokens, max_tokens=max_tokens) == num_cached
    hit = manager.look_up(1, [1] * num_tokens, max_tokens=max_tokens)
    assert hit.num_blocks * 4 == num_cached
    assert hit.max_tokens == min(num_tokens - 1, max_tokens or 99)


def test_without_prefix_caching_nothing_is_found_and_blocks_are_given_all_the_same():
    manager = make_manager(4, caching=False)
    run(manager, 0, [1] * 8)
    assert manager.num_cached_tokens(1, [1] * 9) == 0
    hit = manager.look_up(1, [1] * 9, max_tokens=5)
    assert (hit.num_blocks, hit.needs_step, hit.max_tokens) == (0, False, 5)
    assert manager.can_allocate(hit) is AllocStatus.LATER
    assert manager.can_allocate(manager.look_up(1, [1] * 17)) is AllocStatus.NEVER
    end(manager, 0)
    assert manager.can_allocate(hit) is AllocStatus.OK
    assert manager.allocate(hit) == 0


def test_a_forgotten_sequence_may_come_again_with_other_tokens():
    manager = make_manager(12)
    run(manager, 0, [1] * 8)
    assert manager.num_cached_tokens(9, [1] * 9) == 8
    manager.forget(9)
    manager.forget(10)
    assert manager.num_cached_tokens(9, [2] * 9) == 0
    assert manager.look_up(9, [2] * 9).num_blocks == 0


def test_a_block_is_found_only_once_it_is_computed():
    manager = make_manager()
    tokens = list(range(9))
    manager.allocate(manager.look_up(0, tokens))
    manager.append(0, 0, 9)
    manager.publish(0, tokens, 3)
    assert run(manager, 1, tokens) == 0


def test_a_different_beginning_means_a_different_block():
    manager = make_manager(12)
    run(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(manager, 1, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_eviction_takes_the_deepest_block_of_the_oldest_step():
    manager = make_manager(4)
    run(manager, 0, [1] * 4 + [2] * 4)
    manager.free(0)
    run(manager, 1, [3] * 8)
    manager.free(1)
    assert run(manager, 2, [4] * 4) == 0  # needs one block
    manager.free(2)
    assert run(manager, 3, [1] * 4 + [5] * 5) == 4
    assert manager.stats.num_evicted_tokens > 0


def test_a_shared_block_outlives_one_owner():
    manager = make_manager()
    run(manager, 0, list(range(5)))
    run(manager, 1, list(range(5)))
    manager.free(0)
    manager.check_integrity()
    assert manager.pool.ref_counts[manager.block_tables(1)[0][0]] == 1


def test_a_block_given_back_for_an_equal_one_is_kept_until_it_is_copied():
    """One sequence completes a block while another is about to copy its beginning, and a third was the first to."""
    manager, tokens = make_manager(12), list(range(8))
    run(manager, 0, tokens[:6])
    manager.advance()
    manager.allocate(manager.look_up(1, tokens))
    source = manager.block_tables(0)[0][1]
    assert manager.allocate(manager.look_up(2, [*tokens[:6], 99])) == 6
    (copy,) = copies(manager, 2)
    assert copy.src_block == source
    compute(manager, 1, tokens, 6, 8)
    compute(manager, 0, tokens, 6, 8)
    assert manager.block_tables(0)[0][1] == manager.block_tables(1)[0][1] != source
    assert manager.pool.ref_counts[source] == 1, "only for the copy"
    num_free = manager.pool.num_free_blocks
    compute(manager, 2, [*tokens[:6], 99], 6, 7)
    assert (manager.pool.num_free_blocks, manager.pool.num_cached_blocks) == (num_free + 1, 0)
    end(manager, 0, 1, 2)
    assert run(manager, 3, [*tokens, 99]) == 8


@pytest.mark.essential
def test_can_allocate_counts_what_others_hold_already():
    manager = make_manager(4)
    run(manager, 0, list(range(9)))  # 3 blocks of 4
    assert manager.can_allocate(manager.look_up(1, list(range(9)))) is AllocStatus.OK  # two of them are shared
    assert manager.can_allocate(manager.look_up(2, [7] * 9)) is AllocStatus.LATER
    assert manager.can_allocate(manager.look_up(3, [7] * 17)) is AllocStatus.NEVER


@pytest.mark.essential
def test_hash_collisions_are_caught_by_the_tokens(monkeypatch):
    monkeypatch.setattr(ContentHasher, "child", lambda self, parent, tokens: b"same")
    manager = make_manager()
    run(manager, 0, [1] * 5)
    assert run(manager, 1, [2] * 5) == 0


# Forks


def test_a_fork_shares_everything_and_copies_only_the_block_it_writes_into():
    manager = make_manager(12, caching=False)
    manager.allocate(manager.look_up(0, [1] * 6))
    manager.append(0, 0, 6)
    manager.fork(0, 1)
    manager.check_integrity()
    assert manager.num_used_blocks == 2
    assert manager.can_append(1, 6, 7)
    manager.append(1, 6, 7)
    shared, own = manager.block_tables(0)[0], manager.block_tables(1)[0]
    assert shared[0] == own[0]
    assert shared[1] != own[1]
    assert copies(manager, 1) == (SlotCopy(0, shared[1], own[1], 2),)
    manager.append(1, 6, 7)  # done twice it changes nothing more
    assert len(copies(manager, 1)) == 1
    manager.check_integrity()
    do_step(manager, 1)
    manager.publish(1, [1] * 7, 7)
    manager.append(0, 6, 7)  # nobody else holds it any more
    assert copies(manager, 0) == ()
    manager.check_integrity()


def test_a_fork_at_a_block_border_copies_nothing():
    manager = make_manager(12)
    run(manager, 0, [1] * 8)
    manager.fork(0, 1)
    manager.append(1, 8, 9)
    assert copies(manager, 1) == ()
    for seq_id in (0, 1):
        manager.free(seq_id)
    manager.check_integrity()
    assert manager.num_used_blocks == 0


def test_only_blocks_that_no_other_sequence_holds_are_gained():
    manager = make_manager(12)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    run(manager, 1, [1, 2, 3, 4, 9, 9])
    assert manager.gain([0]) == (1, 2)
    assert manager.gain([0, 1]) == (3, 3)


def test_copy_on_write_needs_a_block_to_spare():
    manager = make_manager(2, caching=False)
    manager.allocate(manager.look_up(0, [1] * 6))
    manager.append(0, 0, 6)
    manager.fork(0, 1)
    assert not manager.can_append(1, 6, 7)
    manager.free(0)
    assert manager.can_append(1, 6, 7)
