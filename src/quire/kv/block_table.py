"""A sequence's logical block index -> block_id, in a form that is cheap to extend and to hand out."""

import numpy as np

from quire.batch import BlockIds


class BlockTable:
    """A growing array of block ids. Not thread-safe; owned by the BlockSpaceManager."""

    __slots__ = ("_ids", "num_blocks")

    def __init__(self) -> None:
        self._ids: BlockIds = np.zeros(8, np.int32)
        self.num_blocks = 0

    def append(self, block_id: int) -> None:
        """Add one block at the end; amortized O(1)."""
        if self.num_blocks == len(self._ids):
            self._ids = np.resize(self._ids, 2 * len(self._ids))
        self._ids[self.num_blocks] = block_id
        self.num_blocks += 1

    def replace(self, index: int, block_id: int) -> None:
        """Put another block in place of the one at `index` (copy-on-write)."""
        self._ids[index] = block_id

    def __getitem__(self, index: int) -> int:
        return int(self._ids[: self.num_blocks][index])

    def ids(self) -> list[int]:
        """All block ids, first to last."""
        ids: list[int] = self._ids[: self.num_blocks].tolist()
        return ids

    def snapshot(self) -> BlockIds:
        """A read-only copy, for a Batch."""
        copy = self._ids[: self.num_blocks].copy()
        copy.flags.writeable = False
        return copy

    def copy(self) -> "BlockTable":
        """An equal table that grows on its own (a fork)."""
        other = BlockTable()
        other._ids, other.num_blocks = self._ids.copy(), self.num_blocks
        return other
