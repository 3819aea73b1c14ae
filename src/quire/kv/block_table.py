"""A sequence's logical block index -> block_id, in a form that is cheap to extend and to hand out."""

from collections.abc import Sequence

import numpy as np

from quire.common.batch import BlockIds

_NO_IDS = np.empty(0, np.int32)
_NO_IDS.flags.writeable = False


class BlockTable:
    """A growing array of block ids. Not thread-safe; owned by the BlockSpaceManager.

    The blocks before `first` have slid out of their group's window: their entries are 0 and name no block.
    """

    __slots__ = ("_ids", "_snapshot", "first")

    def __init__(self, ids: Sequence[int] = (), first: int = 0) -> None:
        self._ids = [0] * first + list(ids)
        self._snapshot = _NO_IDS  # of the first entries, as far as they have not changed
        self.first = first

    @property
    def num_blocks(self) -> int:
        """Logical blocks, those that slid out included."""
        return len(self._ids)

    def extend(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end."""
        self._ids += block_ids

    def replace(self, index: int, block_id: int) -> None:
        """Put another block in place of the one at `index`."""
        self._ids[index] = block_id
        self._snapshot = _NO_IDS

    def cut(self, num_blocks: int) -> list[int]:
        """Remove the blocks behind the first `num_blocks`; returns them."""
        gone = self._ids[num_blocks:]
        if gone:
            del self._ids[num_blocks:]
            self._snapshot = self._snapshot[:num_blocks]
        return gone

    def slide(self, first: int) -> list[int]:
        """Remove the blocks before `first`; returns them."""
        gone = self._ids[self.first : first]
        self._ids[self.first : first] = [0] * len(gone)
        self.first += len(gone)
        self._snapshot = _NO_IDS
        return gone

    def __getitem__(self, index: int) -> int:
        return self._ids[index]

    def ids(self) -> list[int]:
        """The block ids held, first to last."""
        return self._ids[self.first :]

    def snapshot(self) -> BlockIds:
        """A read-only array of all entries, for a Batch; the same one until the table changes."""
        if (known := len(self._snapshot)) < len(self._ids):
            self._snapshot = np.concatenate([self._snapshot, np.array(self._ids[known:], np.int32)])
            self._snapshot.flags.writeable = False
        return self._snapshot

    def copy(self) -> "BlockTable":
        """An equal table that grows on its own (a fork)."""
        return BlockTable(self.ids(), self.first)
