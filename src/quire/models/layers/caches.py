"""From what a layer keeps to the view of its part of the cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.config.kv_cache import AttentionSpec, FullAttentionSpec, KVCacheSpec, LatentSpec, SlidingWindowSpec
from quire.models.layers.batch_tensors import LayerCache, LayerKVCache, LayerLatents


def view_cache(spec: KVCacheSpec, buffer: Tensor, num_blocks: int, block_size: int, group: int) -> LayerCache:
    """The cache of one layer in a uint8 tensor, flat or a row of bytes for each block, and of the group `group`."""
    return _VIEWS[type(spec)](spec, buffer, num_blocks, block_size, group)


def _keys_and_values(spec: AttentionSpec, buffer: Tensor, num_blocks: int, block_size: int, group: int) -> LayerCache:
    sizes, dtype = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim), getattr(torch, spec.dtype)
    return LayerKVCache(*kernels.make_layer_cache(buffer, *sizes, dtype), group)


def _latents(spec: LatentSpec, buffer: Tensor, num_blocks: int, block_size: int, group: int) -> LayerCache:
    dtype = getattr(torch, spec.dtype)
    return LayerLatents(kernels.make_latent_cache(buffer, num_blocks, block_size, spec.width, dtype), group)


_VIEWS: dict[type[KVCacheSpec], Callable[[Any, Tensor, int, int, int], LayerCache]] = {
    FullAttentionSpec: _keys_and_values,
    SlidingWindowSpec: _keys_and_values,
    LatentSpec: _latents,
}
"""A new kind of spec is an entry here."""
