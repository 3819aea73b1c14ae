"""The manager of layers that keep nothing of a sequence."""

import sys
from typing import ClassVar

from quire.kv.managers.base import FindRun, GroupManager


class NoCacheManager(GroupManager):
    """A sequence has no blocks, however long it is, and every prefix can be skipped as far as these layers go."""

    holds_tokens: ClassVar[bool] = False
    is_prefix_closed: ClassVar[bool] = True

    def num_blocks(self, num_tokens: int) -> int:
        return 0

    def max_tokens(self, num_blocks: int) -> int:
        return sys.maxsize

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest_prefix(self, num_blocks: int, find: FindRun) -> int:
        return num_blocks
