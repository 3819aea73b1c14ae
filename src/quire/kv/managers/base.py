"""What the block manager asks about the groups of one kind of KVCacheSpec."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from quire.config.kv_cache import KVCacheSpec

FindRun = Callable[[range], int]
"""Looks for the blocks of one group at these indices, in this order; returns how many it found before the first that
is missing."""


class GroupManager(ABC):
    """Decides which blocks of a sequence a KV cache group needs. It owns no blocks and keeps no state.

    The BlockSpaceManager and the PrefixLookup ask it, and change the block tables accordingly.
    """

    holds_tokens: ClassVar[bool]
    """Whether block i of a table holds tokens i * block_size to (i + 1) * block_size - 1. Only such blocks are
    published to the prefix cache, found there, and copied before a write if they are shared."""

    is_prefix_closed: ClassVar[bool]
    """Whether every part of a prefix that `longest_prefix` accepts would be accepted too. Such groups are searched
    first, and once."""

    def __init__(self, spec: KVCacheSpec, block_size: int) -> None:
        self.block_size = block_size  # what else depends on the spec, a subclass takes from it

    @abstractmethod
    def num_blocks(self, num_tokens: int) -> int:
        """Entries of the block table of a sequence of `num_tokens` tokens; never fewer for more tokens."""

    @abstractmethod
    def max_tokens(self, num_blocks: int) -> int:
        """The most tokens of a sequence whose table has `num_blocks` entries."""

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """The first block that the token behind `num_tokens` tokens still reads; those before it can be freed."""

    @abstractmethod
    def longest_prefix(self, num_blocks: int, find: FindRun) -> int:
        """The most blocks, at most `num_blocks`, that a sequence can skip as far as this group is concerned."""
