"""Pools of blocks: which are free, which are owned, and by how many."""

from abc import ABC, abstractmethod
from array import array
from collections import deque


class BlockAllocator(ABC):
    """Owns the block ids 0 to num_blocks - 1 of one tier and their reference counts.

    `allocate`, `share` and `free` change counts; a block whose count falls to 0 goes back to the pool. Only the
    BlockSpaceManager calls them. All are O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = array("q", bytes(8 * num_blocks))

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can still hand out: free ones, and cached ones nobody holds."""

    @property
    def num_cached_blocks(self) -> int:
        """Of those, blocks that nobody holds and whose content can still be found."""
        return 0

    @abstractmethod
    def allocate(self) -> int:
        """A block with count 1 and unknown content. The caller has checked `num_free_blocks`."""

    def share(self, block_id: int) -> None:
        """One more holder of an owned block."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is not owned and cannot be shared"
        self.ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """One holder less; at 0 the block returns to the pool."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is freed more often than it was taken"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self._release(block_id)

    @abstractmethod
    def _release(self, block_id: int) -> None:
        """Nobody holds the block any more."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Every block is in exactly one state, or AssertionError."""


class NaiveBlockAllocator(BlockAllocator):
    """Free or owned, nothing remembered."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = deque(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        block_id = self._free.popleft()
        self.ref_counts[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        self._free.append(block_id)

    def check_integrity(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        owned = {b for b in range(self.num_blocks) if self.ref_counts[b] > 0}
        assert not free & owned, f"blocks both free and owned: {sorted(free & owned)}"
        assert len(free) + len(owned) == self.num_blocks, "a block is neither free nor owned"
