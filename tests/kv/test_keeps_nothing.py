"""Layers that keep nothing: beside others, and alone."""

import pytest

from quire.config.kv_cache import FullAttentionSpec, NoCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.no_blocks import NoBlocksManager

from .managers import compute, do_step, end, run


def test_layers_that_keep_nothing_live_beside_full_attention():
    specs = [NoCacheSpec(), FullAttentionSpec(1, 2, "float32"), NoCacheSpec(), FullAttentionSpec(1, 2, "float32")]
    config = kv_cache_config(specs, 4, num_bytes=16 * 2 * 4 * 16, host_bytes=8 * 2 * 4 * 16)
    assert [group.layer_ids for group in config.groups] == [(0, 2), (1, 3)]
    assert (config.num_blocks, config.num_host_blocks, config.max_tokens) == (16, 8, 64)
    manager = BlockSpaceManager(config, enable_prefix_caching=True)
    tokens = list(range(10))
    assert [run(manager, 0, tokens), run(manager, 1, [*tokens[:9], 90])] == [0, 9]
    manager.fork(0, 2)
    compute(manager, 2, [*tokens, 91], 10, 11)
    assert [len(table) for table in manager.block_tables(2)] == [0, 3]
    manager.swap_out([0, 1])
    do_step(manager)
    assert manager.can_swap_in([0, 1], 12)
    manager.swap_in([0, 1])
    manager.check_integrity()
    pin = manager.pins.pin(tokens)
    end(manager, 0, 1, 2)
    assert manager.num_used_blocks == pin.num_blocks == 3


def nothing(kind: str) -> BlockSpaceManager:
    config = kv_cache_config([NoCacheSpec()] * 3, 4, num_bytes=0)
    return NoBlocksManager(config) if kind == "no blocks" else BlockSpaceManager(config, enable_prefix_caching=True)


@pytest.mark.parametrize("kind", ["no blocks", "any blocks"])
def test_where_no_layer_keeps_anything_sequences_live_without_blocks(kind):
    manager, tokens = nothing(kind), list(range(100))
    assert run(manager, 0, tokens) == 0
    assert manager.can_allocate(hit := manager.look_up(1, tokens)) is AllocStatus.OK
    assert [hit.num_blocks, hit.needs_step, hit.is_awaited, manager.num_cached_tokens(1, tokens)] == [
        0,
        False,
        False,
        0,
    ]
    assert manager.allocate(hit) == 0
    manager.append(1, 0, 100)
    assert (0 in manager, 1 in manager, 2 in manager) == (True, True, False)
    assert manager.has_room(1, 10_000)
    assert manager.can_append(1, 100, 10_000, num_left=0)
    assert [(seq_id, tier) for seq_id, tier, _ in manager.holdings()] == [(0, 0), (1, 0)]
    assert [len(table) for table in manager.block_tables(1)] == [0]
    assert manager.gain([0, 1]) == (0, 0)
    end(manager, 0)
    assert 0 not in manager
    manager.fork(1, 3)
    end(manager, 1, 3)
    assert list(manager.holdings()) == []
    assert manager.num_used_blocks == manager.pool.num_cached_blocks == manager.pins.num_blocks == 0


@pytest.mark.parametrize("kind", ["no blocks", "any blocks"])
def test_a_step_without_blocks_copies_nothing_and_can_be_reverted(kind):
    manager = nothing(kind)
    manager.advance()
    manager.allocate(manager.look_up(0, [1, 2]))
    manager.append(0, 0, 2)
    assert (manager.take_transfers(manager.step), manager.take_copies([0], manager.step)) == ((), ())
    manager.revert(manager.step)
    manager.check_integrity()
    assert 0 in manager
    manager.free(0)
    assert run(manager, 0, [1, 2]) == 0
    assert manager.step == 3
    with pytest.raises(AssertionError, match="sequence 0 has"):
        manager.allocate(manager.look_up(0, [1, 2]))
    end(manager, 0)
    with pytest.raises(KeyError):
        manager.free(0)
