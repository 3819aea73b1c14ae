"""The pools of blocks on the device and on the host, and what moves between them."""

from collections.abc import Callable, Sequence

from quire.common.batch import BlockPairs
from quire.config.kv_cache import KVCacheConfig
from quire.kv.allocator import BlockAllocator, NaiveBlockAllocator
from quire.kv.block_table import BlockTable
from quire.kv.content_hash import BlockHash
from quire.kv.prefix_cache import BlockContent, EvictedHashes, PrefixCachingBlockAllocator
from quire.kv.stats import PrefixCacheStats


class Tiers:
    """Owns both pools. Collects the copies between them while a step is planned.

    Within a step all copies out run before all copies in, so a block of the host tier that either touches is held until
    the step has been committed. A cached block that is evicted from the device tier is kept in the host tier while
    there is room, and dropped there in turn when room is needed.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        caching: bool,
        stats: PrefixCacheStats,
        on_change: Callable[[int, BlockHash], None],
    ) -> None:
        self.pool: BlockAllocator = NaiveBlockAllocator(config.num_blocks)
        self.host: BlockAllocator = NaiveBlockAllocator(config.num_host_blocks)
        self.caches: tuple[PrefixCachingBlockAllocator, PrefixCachingBlockAllocator] | None = None
        if caching:
            num_groups = len(config.groups)
            self.pool = device = PrefixCachingBlockAllocator(config.num_blocks, num_groups, self._evicted, on_change)
            self.host = host = PrefixCachingBlockAllocator(config.num_host_blocks, num_groups, self._dropped, on_change)
            self.caches = device, host
        self.evicted = EvictedHashes()
        self.held: list[int] = []
        """blocks of the host tier that the step's copies read or write"""
        self.journal: list[tuple[str, int]] | None = None
        """("evicted" or "spilled", block), one after another, while somebody watches; it is theirs to empty"""
        self._spilled: list[int] = []  # of these, the ones whose cached content comes with the step
        self._stats = stats
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    def move_out(self, tables: Sequence[BlockTable]) -> None:
        """Exchange the tables' blocks for blocks of the host tier, shared ones once."""
        moved: dict[int, int] = {}
        for table in tables:
            for index, block_id in enumerate(table.ids(), start=table.first):
                if block_id in moved:
                    self.host.share(moved[block_id])
                else:
                    moved[block_id] = host_block = self.host.allocate()
                    self.host.share(host_block)  # in the step that fills it nobody else may
                    self.held.append(host_block)
                    self._swap_out.append((block_id, host_block))
                table.replace(index, moved[block_id])
                self.pool.free(block_id)

    def move_in(self, tables: Sequence[BlockTable]) -> None:
        """Exchange the tables' blocks, of the host tier, for blocks of the device's."""
        moved: dict[int, int] = {}
        for table in tables:
            for index, block_id in enumerate(table.ids(), start=table.first):
                if block_id in moved:
                    self.pool.share(moved[block_id])
                    self.host.free(block_id)
                else:
                    moved[block_id] = self.copy_in(block_id)
                table.replace(index, moved[block_id])

    def copy_in(self, host_block: int) -> int:
        """A new device block with the content of a host block, whose hold passes to this object."""
        block_id = self.pool.allocate()
        self._swap_in.append((host_block, block_id))
        self.held.append(host_block)
        return block_id

    def take_transfers(self) -> tuple[BlockPairs, BlockPairs]:
        """What the coming step is to copy out, (device, host), and then in, (host, device)."""
        taken = tuple(self._swap_out), tuple(self._swap_in)
        self._swap_out.clear()
        self._swap_in.clear()
        return taken

    def settle(self) -> None:
        """The step has succeeded: its copies are done."""
        for block_id in self.held:
            self.host.free(block_id)
        self.held.clear()
        self._spilled.clear()

    def revert(self) -> None:
        """The step has failed: what it was to spill may not be there."""
        if self.caches is not None:
            for block_id in self._spilled:
                self._lost(self.caches[1].tracker[block_id])
                self.caches[1].forget(block_id)
        self.take_transfers()
        self.settle()

    def advance(self, step: int) -> None:
        """Blocks released from here on count as used in this step."""
        for cache in self.caches or ():
            cache.step = step

    def _evicted(self, block_id: int, content: BlockContent) -> None:
        """A cached block of the device tier is about to be given out."""
        assert self.caches is not None
        host = self.caches[1]
        if content.block_hash is not None:
            known = host.tracker.find(content.group, content.block_hash, content.tokens)
            if known is not None:
                host.acquire(known)  # it counts as used now
                host.free(known)
                return
            if host.num_free_blocks:
                host_block = host.allocate()
                host.tracker.add(host_block, content)
                self._swap_out.append((block_id, host_block))
                self.held.append(host_block)
                self._spilled.append(host_block)
                self._stats.num_spilled_tokens += content.num_tokens
                self._note("spilled", block_id)
                return
        self._note("evicted", block_id)
        self._lost(content)

    def _dropped(self, block_id: int, content: BlockContent) -> None:
        """A cached block of the host tier is about to be given out."""
        assert self.caches is not None
        assert content.block_hash is not None, f"block {block_id} of the host tier is partly full"
        if self.caches[0].tracker.find(content.group, content.block_hash, content.tokens) is None:
            self._lost(content)

    def _note(self, event: str, block_id: int) -> None:
        if self.journal is not None:
            self.journal.append((event, block_id))

    def _lost(self, content: BlockContent) -> None:
        self._stats.num_evicted_tokens += content.num_tokens
        if content.block_hash is not None:
            self.evicted.add(content.block_hash)
