"""Managers of attention layers, which keep keys and values for each token."""

from typing import ClassVar

from quire.config.kv_cache import KVCacheSpec, SlidingWindowSpec
from quire.kv.managers.base import FindRun, GroupManager


class FullAttentionManager(GroupManager):
    """Every token reads all tokens before it, so a sequence keeps all its blocks, and a prefix needs all of its own."""

    holds_tokens: ClassVar[bool] = True
    is_prefix_closed: ClassVar[bool] = True

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_tokens(self, num_blocks: int) -> int:
        return num_blocks * self.block_size

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest_prefix(self, num_blocks: int, find: FindRun) -> int:
        return find(range(num_blocks))


class SlidingWindowManager(FullAttentionManager):
    """A token reads the last tokens only: older blocks are freed, and a prefix needs the last of its blocks."""

    is_prefix_closed: ClassVar[bool] = False

    def __init__(self, spec: KVCacheSpec, block_size: int) -> None:
        assert isinstance(spec, SlidingWindowSpec)
        super().__init__(spec, block_size)
        self._num_past = spec.sliding_window - 1  # tokens that a token reads besides itself

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self._num_past) // self.block_size

    def longest_prefix(self, num_blocks: int, find: FindRun) -> int:
        """Where a block is missing, every longer prefix whose window reaches back to it is out of the question."""
        while True:
            indices = range(num_blocks - 1, self.first_needed(num_blocks * self.block_size) - 1, -1)
            num_found = find(indices)
            if num_found == len(indices):
                return num_blocks
            num_blocks = indices[num_found]
