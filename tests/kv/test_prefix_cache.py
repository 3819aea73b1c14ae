"""Equal prefixes share blocks; only computed ones; the least recently used go first."""

import pytest

from quire.config.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from quire.kv.allocator import NaiveBlockAllocator, PrefixCachingBlockAllocator
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager

SPEC = KVCacheSpec(1, 2, "float32")


def make_manager(num_blocks: int = 6, num_groups: int = 1, caching: bool = True) -> BlockSpaceManager:
    groups = tuple(KVCacheGroup((i,), SPEC) for i in range(num_groups))
    return BlockSpaceManager(KVCacheConfig(4, num_blocks, 1, groups), enable_prefix_caching=caching)


def run(manager: BlockSpaceManager, seq_id: int, tokens: list[int]) -> int:
    """Allocate, fill and publish a sequence; returns what came from the cache."""
    cached = manager.allocate(seq_id, tokens)
    manager.append(seq_id, len(tokens))
    manager.publish(seq_id, tokens, len(tokens))
    manager.check_integrity()
    return cached


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_prefix_is_shared_while_its_owner_runs_and_after(num_groups):
    manager = make_manager(12, num_groups)
    tokens = list(range(10))
    assert run(manager, 0, tokens) == 0
    assert run(manager, 1, tokens) == 8
    assert manager.block_tables(0)[0][:2].tolist() == manager.block_tables(1)[0][:2].tolist()
    manager.free(0)
    manager.free(1)
    assert manager.num_used_blocks == 0
    assert run(manager, 2, [*tokens[:8], 99, 98]) == 8
    assert manager.num_hit_tokens == 16


def test_the_last_token_is_always_computed():
    manager = make_manager()
    run(manager, 0, list(range(8)))
    assert run(manager, 1, list(range(8))) == 4
    assert run(manager, 2, list(range(9))) == 8


def test_a_block_is_found_only_once_it_is_computed():
    manager = make_manager()
    tokens = list(range(9))
    manager.allocate(0, tokens)
    manager.append(0, 9)
    manager.publish(0, tokens, 3)
    assert run(manager, 1, tokens) == 0


def test_a_different_beginning_means_a_different_block():
    manager = make_manager(12)
    run(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(manager, 1, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_eviction_takes_the_least_recently_used_and_of_a_sequence_the_deepest():
    manager = make_manager(4)
    run(manager, 0, [1] * 4 + [2] * 4)
    manager.free(0)
    run(manager, 1, [3] * 8)
    manager.free(1)
    assert run(manager, 2, [4] * 4) == 0  # needs one block: the deepest of the oldest goes
    manager.free(2)
    assert run(manager, 3, [1] * 4 + [2] * 5) == 4


def test_a_shared_block_outlives_one_owner():
    manager = make_manager()
    run(manager, 0, list(range(5)))
    run(manager, 1, list(range(5)))
    manager.free(0)
    manager.check_integrity()
    assert manager.pool.ref_counts[manager.block_tables(1)[0][0]] == 1


def test_can_allocate_counts_what_others_hold_already():
    manager = make_manager(4)
    run(manager, 0, list(range(9)))  # 3 blocks of 4
    assert manager.can_allocate(list(range(9))) is AllocStatus.OK  # two of them are shared
    assert manager.can_allocate([7] * 9) is AllocStatus.LATER
    assert manager.can_allocate([7] * 17) is AllocStatus.NEVER


def test_hash_collisions_are_caught_by_the_tokens(monkeypatch):
    manager = make_manager()
    monkeypatch.setattr(manager.prefix_cache, "content_hash", lambda parent, tokens: b"same")
    run(manager, 0, [1] * 5)
    assert run(manager, 1, [2] * 5) == 0


def test_two_engines_never_agree_on_a_hash():
    first, second = PrefixCachingBlockAllocator(1), PrefixCachingBlockAllocator(1)
    assert first.content_hash(b"", [1, 2]) != second.content_hash(b"", [1, 2])


@pytest.mark.parametrize("allocator", [NaiveBlockAllocator, PrefixCachingBlockAllocator])
def test_a_double_free_is_refused(allocator):
    pool = allocator(2)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(block)


def test_integrity_notices_a_lost_block_and_a_wrong_count():
    manager = make_manager()
    run(manager, 0, list(range(5)))
    manager.pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        manager.check_integrity()
