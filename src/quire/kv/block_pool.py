"""A pool of blocks: which are free, which are in use, and which are cached."""

from array import array
from collections.abc import Callable

from quire.kv.place import DEVICE
from quire.kv.prefix_cache.evictor import LRUEvictor
from quire.kv.prefix_cache.tracker import BlockContent, BlockTracker, OnChange


class BlockPool:
    """Owns the block ids 0 to num_blocks - 1 of one tier and their reference counts.

    A block is free; or owned, while its count is above zero; or cached: its count is zero, but `tracker` knows what it
    contains, so it can be found until it is evicted. Without prefix caching nothing is ever cached. Only the parts of
    the BlockSpaceManager call its methods. All of them are O(1), except `check_integrity`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        on_evict: Callable[[int, BlockContent], None],
        on_change: OnChange,
        tier: int = DEVICE,
    ) -> None:
        """`on_evict` is called with a block and the content that it has lost, `on_change` by the tracker."""
        self.num_blocks = num_blocks
        self.ref_counts = array("q", bytes(8 * num_blocks))
        self.tracker = BlockTracker(num_groups, on_change, tier)
        self.evictor = LRUEvictor()
        self.step = 0
        """The current step, as a time of last use. The manager sets it."""
        self._free = list(reversed(range(num_blocks)))  # freed last, taken first: memory never used stays so
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that `allocate` can still return: free ones and cached ones."""
        return len(self._free) + len(self.evictor)

    @property
    def num_cached_blocks(self) -> int:
        """The number of cached blocks."""
        return len(self.evictor)

    def allocate(self) -> int:
        """Return a block with count 1 and unknown content. The caller has checked `num_free_blocks`."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = self.evictor.evict()
            self._on_evict(block_id, self.tracker.pop(block_id))
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a holder to an owned block."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is not owned and cannot be shared"
        self.ref_counts[block_id] += 1

    def acquire(self, block_id: int) -> None:
        """Add a holder to a block with known content, whether it is owned or cached."""
        if self.ref_counts[block_id] == 0:
            self.evictor.remove(block_id)
        self.ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """Remove a holder from an owned block. Without another holder it is cached if its content is known, or else
        free."""
        num_left = self.ref_counts[block_id] - 1
        assert num_left >= 0, f"block {block_id} is freed more often than it was taken"
        self.ref_counts[block_id] = num_left
        if num_left:
            return
        content = self.tracker.get(block_id)
        if content is not None:
            self.evictor.add(block_id, self.step, content.depth)
        else:
            self._free.append(block_id)

    def forget(self, block_id: int) -> None:
        """Make a block's content impossible to find; a cached block becomes free."""
        self.tracker.discard(block_id)
        if self.ref_counts[block_id] == 0:
            self.evictor.remove(block_id)
            self._free.append(block_id)

    def forget_cached(self) -> None:
        """Make all cached blocks free."""
        for block_id in [block_id for block_id in self.tracker.block_ids() if self.ref_counts[block_id] == 0]:
            self.forget(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        free = set(self._free)
        cached = {b for b in range(self.num_blocks) if b in self.evictor}
        owned = {b for b in range(self.num_blocks) if self.ref_counts[b] > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & owned, f"blocks both free and owned: {sorted(free & owned)}"
        assert not cached & owned, f"blocks both evictable and owned: {sorted(cached & owned)}"
        assert not cached & free, f"blocks both evictable and free: {sorted(cached & free)}"
        assert len(free) + len(cached) + len(owned) == self.num_blocks, "a block is in no state"
        assert len(cached) == len(self.evictor), "the evictor holds a block that does not exist"
        assert all(b in self.tracker for b in cached), "an evictable block has no content"
        assert not any(b in self.tracker for b in free), "a free block has content"
        self.tracker.check_integrity()
