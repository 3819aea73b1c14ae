"""The memory of the KV cache, and the moves of blocks and tokens in it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import SlotCopy, Transfer
from quire.common.faults import fault_point
from quire.config.kv_cache import KVCacheConfig
from quire.models.layers.batch_tensors import LayerCache
from quire.models.layers.caches import view_cache


class CacheEngine:
    """Owns the blocks of each tier: rows of bytes, allocated at the start by the backends of their devices.

    Layer i of every group is a view of part i of each row, and those of a draft model lie behind them. So a block lies
    in one piece, and is swapped in one piece.
    """

    def __init__(self, config: KVCacheConfig, backend: kernels.Backend) -> None:
        self.config = config
        self.blocks = backend.zeroed_blocks(config.num_blocks, config.block_bytes)
        self.tiers = [self.blocks, kernels.backend_for("cpu").zeroed_blocks(config.num_host_blocks, config.block_bytes)]
        self.draft_layers: list[LayerCache] = []
        """The caches of a draft model's layers."""
        self.layers = self._layer_views()
        """The caches of the model's layers: that of layer i at index i. There are none if no layer keeps anything."""

    def _layer_views(self) -> list[LayerCache]:
        views: dict[int, LayerCache] = {}
        for group_id, group in enumerate(() if self.config.keeps_nothing else self.config.groups):
            block_size, end = self.config.block_size, 0
            parts = list[LayerCache]()
            for spec in (group.spec,) * len(group.layer_ids) + group.draft_specs:
                start, end = end, end + spec.block_bytes(block_size)
                buffer = self.blocks[:, start:end]
                parts.append(view_cache(spec, buffer, self.config.num_blocks, block_size, group_id))
            self.draft_layers += parts[len(group.layer_ids) :]
            views.update(zip(group.layer_ids, parts, strict=False))
        return [views[layer_id] for layer_id in range(len(views))]

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy whole blocks between the tiers, in this order."""
        for transfer in transfers:
            fault_point("cache.transfer")
            source, target = self.tiers[transfer.source_tier], self.tiers[transfer.target_tier]
            kernels.copy_blocks(source, target, torch.tensor(transfer.pairs, dtype=torch.int64))

    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        """Copy the slots that a step needs copied, in all layers of each copy's group."""
        for group in sorted({copy.group for copy in copies}):
            fault_point("cache.copy")
            src, dst = self._slots([copy for copy in copies if copy.group == group])
            for layer in (*self.layers, *self.draft_layers):
                if layer.group == group:
                    layer.copy_slots(src, dst)

    def _slots(self, copies: Sequence[SlotCopy]) -> tuple[Tensor, Tensor]:
        """Source and destination slot of every token copied, each [num_tokens] int64."""
        sizes = [copy.num_slots for copy in copies]
        offsets = np.concatenate([np.arange(size) for size in sizes])
        src, dst = (
            np.repeat(np.array(blocks, np.int64), sizes) * self.config.block_size + offsets
            for blocks in ([copy.src_block for copy in copies], [copy.dst_block for copy in copies])
        )
        return torch.from_numpy(src), torch.from_numpy(dst)
