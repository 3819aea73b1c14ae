"""One sequence's part of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.block_table import BlockTable
from quire.kv.managers.base import GroupManager
from quire.kv.place import DEVICE


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks that a sequence owns a hold on, and what is known of them."""

    tables: list[BlockTable]
    """One for each KV cache group."""
    num_full: int = 0
    """The number of blocks at the beginning that are computed, and that other sequences can find."""
    num_announced: int = 0
    """Blocks from `num_full` to here are announced as being computed by this sequence."""
    num_writable: int = 0
    """Tokens that the sequence can certainly hold without another block or a copy before a write."""
    num_scheduled: int = 0
    """Tokens computed once step `scheduled_step` has succeeded."""
    scheduled_step: int = -1
    tier: int = DEVICE
    """Where all blocks of the tables are."""

    def cut(self, managers: Sequence[GroupManager], num_tokens: int) -> list[int]:
        """Remove the blocks behind those of the first `num_tokens` tokens; returns them, the last one first."""
        gone = list[int]()
        for table, manager in zip(self.tables, managers, strict=True):
            gone += table.cut(manager.num_blocks(num_tokens))
            self.num_writable = min(self.num_writable, manager.max_tokens(table.num_blocks))
        return gone[::-1]
