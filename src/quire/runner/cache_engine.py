"""Owns the memory of the KV cache and moves whole blocks in it."""

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.batch import BlockPairs
from quire.config.kv_cache import KVCacheConfig
from quire.errors import OutOfMemoryError
from quire.layers.batch_tensors import LayerKVCache

_ALIGNMENT = 64


class CacheEngine:
    """One flat byte tensor per KVCacheConfig tensor, allocated up front, viewed per layer in the kernels' shape."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.tensors = [_zeros(config.num_blocks * config.block_bytes) for _ in range(config.num_tensors)]
        self.layers = self._layer_views()

    def _layer_views(self) -> list[LayerKVCache]:
        """Layer i of the model finds its cache at index i."""
        views: dict[int, LayerKVCache] = {}
        for group_id, group in enumerate(self.config.groups):
            spec = group.spec
            for tensor, layer_id in zip(self.tensors, group.layer_ids, strict=False):
                k, v = kernels.make_layer_cache(
                    tensor,
                    self.config.num_blocks,
                    self.config.block_size,
                    spec.num_kv_heads,
                    spec.head_dim,
                    getattr(torch, spec.dtype),
                )
                views[layer_id] = LayerKVCache(k, v, group_id)
        return [views[layer_id] for layer_id in range(len(views))]

    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Copy each source block onto its destination, in every tensor."""
        if pairs:
            index = torch.tensor(pairs, dtype=torch.int64)
            for tensor in self.tensors:
                blocks = tensor.view(self.config.num_blocks, -1)
                kernels.copy_blocks(blocks, blocks, index)


def _zeros(num_bytes: int) -> Tensor:
    """Zeroed bytes at a kernel's alignment; the pages are taken from the machine only when first written."""
    try:
        memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"the machine refused {num_bytes} bytes for a KV cache tensor: give a smaller kv_cache_memory"
        ) from error
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes])
