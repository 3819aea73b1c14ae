"""Layers that keep nothing: beside others, and alone."""

from quire.config.kv_cache import FullAttentionSpec, NoCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.kv.block_space_manager import BlockSpaceManager

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
