"""Layers of unequal bytes per token live in one pool, each in its own part of a block's bytes."""

import torch

from quire import kernels
from quire.common.batch import SlotCopy
from quire.config.kv_cache import FullAttentionSpec, SlidingWindowSpec
from quire.config.kv_layout import kv_cache_config
from quire.kv.block_space_manager import BlockSpaceManager
from quire.runner.cache_engine import CacheEngine

from .managers import end, run

WIDE, NARROW = FullAttentionSpec(2, 16, "float32"), SlidingWindowSpec(1, 16, "bfloat16", 6)


def test_sequences_share_blocks_of_groups_of_unequal_bytes():
    config = kv_cache_config([WIDE, NARROW, NARROW, WIDE], 4, num_blocks=20)
    assert [group.layer_ids for group in config.groups] == [(0,), (3,), (1, 2)]
    assert [group.block_bytes(4) for group in config.groups] == [1024, 1024, 512]
    manager = BlockSpaceManager(config, enable_prefix_caching=True)
    tokens = list(range(18))
    assert run(manager, 0, tokens, chunk=4) == 0
    assert run(manager, 1, [*tokens[:16], 90, 91]) == 16
    held = [[len(table.ids()) for table in tables] for _, _, tables in manager.holdings()]
    assert held == [[5, 5, 3], [5, 5, 3]], "a window keeps less"
    end(manager, 0, 1)


def test_a_layer_never_writes_into_the_bytes_of_another():
    config = kv_cache_config([WIDE, NARROW, NARROW], 4, num_blocks=4)
    engine = CacheEngine(config, kernels.backend_for("cpu"))
    for number, layer in enumerate(engine.layers):
        layer.k.fill_(number + 1)
        layer.v.fill_(number + 1)
    assert all(bool((layer.k == number + 1).all()) for number, layer in enumerate(engine.layers) if number)
    blocks = engine.blocks.clone()
    copied = engine.layers[1].group
    engine.copy_slots([SlotCopy(copied, 0, 3, 4)])
    assert torch.equal(engine.blocks[:3], blocks[:3])
    assert torch.equal(engine.blocks[3], blocks[0])
