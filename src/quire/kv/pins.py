"""Prefixes that stay in the cache whatever else is needed."""

from collections import Counter
from dataclasses import dataclass

from quire.errors import RequestError


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix kept resident until it is unpinned."""

    pin_id: int
    num_tokens: int
    """computed and kept"""
    num_blocks: int
    """that hold them; other pins may share some"""


class Pins:
    """Which blocks of the device tier are pinned, how often, and how many may be."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.block_ids: dict[int, list[int]] = {}
        self._counts: Counter[int] = Counter()
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        """Different blocks pinned."""
        return len(self._counts)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._counts

    def check_quota(self, num_new_blocks: int) -> None:
        """Raise RequestError if so many more blocks are too many."""
        if self.num_blocks + num_new_blocks > self.max_blocks:
            raise RequestError(
                f"pinning this prefix takes {num_new_blocks} more blocks, and {self.num_blocks} of at most "
                f"{self.max_blocks} are pinned: unpin others, or raise pinned_fraction"
            )

    def add(self, block_ids: list[int]) -> int:
        """Note a pin whose blocks the caller holds for it; returns its id."""
        pin_id, self._next_id = self._next_id, self._next_id + 1
        self.block_ids[pin_id] = block_ids
        self._counts.update(block_ids)
        return pin_id

    def remove(self, pin_id: int) -> list[int]:
        """Forget a pin; returns the blocks that the caller now holds no longer."""
        block_ids = self.block_ids.pop(pin_id, None)
        if block_ids is None:
            raise RequestError(f"pin {pin_id} is unknown, or unpinned already")
        self._counts.subtract(block_ids)
        self._counts += Counter()  # drops those at 0
        return block_ids
