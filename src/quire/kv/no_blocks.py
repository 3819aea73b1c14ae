"""The manager of a model whose layers all keep nothing, and the choice of a model's manager."""

import sys
from collections.abc import Sequence

from quire.common.batch import BlockIds, SlotCopy, Transfer
from quire.common.faults import fault_point
from quire.config.cache import CacheConfig
from quire.config.kv_cache import KVCacheConfig
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.block_table import BlockTable
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from quire.kv.prefix_cache.lookup import PrefixHit
from quire.kv.sequence_blocks import SequenceBlocks


class NoBlocksManager(BlockSpaceManager):
    """Knows which sequences have started, and gives them no blocks, so that there is always room and nothing to copy.

    It overrides what every request and every step calls; the rest works on the same empty tables for all sequences.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        """No layer of the model keeps anything."""
        super().__init__(config, enable_prefix_caching=False)
        self._nothing = SequenceBlocks([BlockTable() for _ in config.groups], num_writable=sys.maxsize)
        self._snapshots = tuple([table.snapshot() for table in self._nothing.tables])

    def look_up(
        self, seq_id: int, token_ids: Sequence[int], key: ContentKey = NO_KEY, max_tokens: int | None = None
    ) -> PrefixHit:
        return PrefixHit(seq_id, token_ids, 0)

    def can_allocate(self, hit: PrefixHit) -> AllocStatus:
        return AllocStatus.OK

    def allocate(self, hit: PrefixHit) -> int:
        assert hit.seq_id not in self._sequences, f"sequence {hit.seq_id} has started already"
        fault_point("blocks.allocate", hit.seq_id)
        self._sequences[hit.seq_id] = self._nothing
        return 0

    def append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Does nothing, like the other methods without a body."""

    def publish(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None: ...

    def publish_tail(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None: ...

    def free(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    def advance(self, *, is_open: bool = True) -> None:
        self.step += 1

    def block_tables(self, seq_id: int) -> tuple[BlockIds, ...]:
        return self._snapshots

    def take_transfers(self, step: int) -> tuple[Transfer, ...]:
        return ()

    def take_copies(self, seq_ids: Sequence[int], step: int) -> tuple[SlotCopy, ...]:
        return ()

    def settle(self, step: int) -> None: ...

    def revert(self, step: int) -> None: ...


def make_block_manager(kv_cache: KVCacheConfig, cache: CacheConfig) -> BlockSpaceManager:
    """The manager for these layers, set up as the engine's arguments say."""
    if kv_cache.keeps_nothing:
        return NoBlocksManager(kv_cache)
    share, caches = cache.pinned_fraction, cache.enable_prefix_caching
    return BlockSpaceManager(kv_cache, enable_prefix_caching=caches, watermark=cache.watermark, pinned_fraction=share)
