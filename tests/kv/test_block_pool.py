"""A pool gives out each block once, evicts the cached block of the least value, and sees when its accounts disagree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.block_table import BlockTable
from quire.kv.prefix_cache.content_hash import token_bytes
from quire.kv.prefix_cache.evictor import LRUEvictor
from quire.kv.prefix_cache.tracker import BlockContent
from tests.effort import examples

from .managers import make_manager, make_pool, run


def test_the_manager_and_its_pools_count_steps_alike():
    manager = make_manager(num_host_blocks=2)
    for step in range(3):
        assert [manager.step, *(pool.step for pool in manager.tiers.pools)] == [step] * 3
        manager.advance()


def test_the_evictor_goes_by_age_then_depth():
    evictor = LRUEvictor()
    for block_id, age, depth in [(0, 1, 0), (1, 1, 2), (2, 1, 1), (3, 2, 9), (4, 2, 9), (5, 3, 0)]:
        evictor.add(block_id, age, depth)
    evictor.remove(2)
    assert [evictor.evict() for _ in range(len(evictor))] == [1, 0, 4, 3, 5]


@settings(max_examples=examples(100), deadline=None)
@given(steps=st.lists(st.lists(st.tuples(st.sampled_from("aer"), st.integers(0, 7), st.integers(0, 3)), max_size=9)))
def test_the_evictor_takes_the_latest_of_the_deepest_of_the_oldest(steps):
    evictor, blocks = LRUEvictor(), []
    for age, changes in enumerate(steps):
        for change, block_id, depth in changes:
            known = next((block for block in blocks if block[0] == block_id), None)
            if change == "a" and known is None:
                evictor.add(block_id, age, depth)
                blocks.append((block_id, age, depth))
            elif change == "r" and known is not None:
                evictor.remove(block_id)
                blocks.remove(known)
            elif change == "e" and blocks:
                expected = min(reversed(blocks), key=lambda block: (block[1], -block[2]))
                assert evictor.evict() == expected[0]
                blocks.remove(expected)
            assert len(evictor) == len(blocks)


# Tables


def test_entries_that_slid_out_are_zero_in_a_read_only_snapshot():
    table = BlockTable([7, 8], first=2)
    assert table.snapshot().tolist() == [0, 0, 7, 8]
    table.extend([9])
    assert table.slide(4) == [7, 8]
    snapshot = table.snapshot()
    assert snapshot.tolist() == [0, 0, 0, 0, 9]
    assert (table.first, table.ids(), table.num_blocks) == (4, [9], 5)
    assert snapshot.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        snapshot[4] = 1


def test_snapshots_stay_as_they_are_when_blocks_are_cut_and_others_added():
    table = BlockTable([3, 4, 5])
    before = table.snapshot()
    assert table.cut(3) == []
    assert table.snapshot() is before
    assert table.cut(1) == [4, 5]
    cut = table.snapshot()
    table.extend([6])
    table.extend([7])
    assert table.cut(2) == [7]
    assert [ids.tolist() for ids in (before, cut, table.snapshot())] == [[3, 4, 5], [3], [3, 6]]
    assert not cut.flags.writeable


def test_a_snapshot_is_made_again_only_after_a_change_of_the_table():
    manager = make_manager(12)
    run(manager, 0, [1] * 8)
    (before,) = manager.block_tables(0)
    manager.append(0, 8, 12)
    (after,) = manager.block_tables(0)
    assert (len(before), len(after)) == (2, 3)
    manager.publish(0, [1] * 12, 12)
    assert manager.block_tables(0)[0] is after


# Integrity


def test_a_block_without_a_holder_can_be_neither_freed_nor_shared():
    pool = make_pool(2)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(block)
    with pytest.raises(AssertionError, match="not owned"):
        pool.share(block)


def owned_and_free(pool):
    pool._free.append(pool.allocate())


def owned_and_cached(pool):
    pool.allocate()
    pool.evictor.add(pool.allocate(), 0, 0)


def free_and_cached(pool):
    pool.evictor.add(0, 0, 0)


def content_that_is_not_indexed(pool):
    block = pool.allocate()
    pool.tracker.add(block, BlockContent(0, b"parent", token_bytes([1] * 4), 0, b"hash"))
    pool.tracker[block].block_hash = None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (owned_and_free, r"both free and owned: \[0\]"),
        (owned_and_cached, r"both evictable and owned: \[1\]"),
        (free_and_cached, r"both evictable and free: \[0\]"),
        (content_that_is_not_indexed, "the index by hash and the contents disagree"),
    ],
)
def test_a_check_of_a_pool_names_the_blocks_that_are_in_two_states(damage, message):
    pool = make_pool(4)
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_a_check_of_the_manager_sees_a_block_that_no_sequence_holds():
    manager = make_manager()
    run(manager, 0, list(range(5)))
    manager.pool.allocate()
    with pytest.raises(AssertionError, match="differ from the holders"):
        manager.check_integrity()


def test_a_check_of_the_manager_includes_both_pools():
    for tier in (0, 1):
        manager = make_manager(num_host_blocks=4)
        manager.tiers.pools[tier]._free.append(0)
        with pytest.raises(AssertionError, match="twice in the free list"):
            manager.check_integrity()


def test_a_check_of_the_manager_sees_a_wrong_hash_and_a_stale_announcement():
    manager = make_manager()
    run(manager, 0, list(range(9)))
    block_hash, _ = manager.prefixes.chains[0].block(0)
    manager.prefixes.lookup.computing[block_hash] = 0
    with pytest.raises(AssertionError, match="said to compute a block that it does not"):
        manager.check_integrity()
    del manager.prefixes.lookup.computing[block_hash]
    manager.check_integrity()
    manager.pool.tracker[manager.block_tables(0)[0][1]].tokens = token_bytes([5] * 4)
    with pytest.raises(AssertionError, match="hash is not that of its tokens"):
        manager.check_integrity()
