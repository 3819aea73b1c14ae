"""Which cached block is evicted first."""

from collections import OrderedDict


class LRUEvictor:
    """Evicts the least recently used block first; of blocks last used in the same step, the deepest in its sequence.

    So the beginning of a prefix is kept longer than its end. Blocks are kept in buckets by step of last use. Adding,
    removing and evicting are O(1), except that a bucket is sorted when the first of its blocks is evicted, and again
    only if blocks have been added since, which happens in the current step alone.
    """

    def __init__(self) -> None:
        self._ages: OrderedDict[int, _SameAge] = OrderedDict()  # Oldest first: steps only grow.
        self._places: dict[int, int] = {}  # block_id -> age

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    def add(self, block_id: int, age: int, depth: int) -> None:
        """Add a block that has no holder any more; `age` is the current step."""
        same_age = self._ages.get(age)
        if same_age is None:
            same_age = self._ages[age] = _SameAge()
        same_age.depths[block_id] = depth
        same_age.order = None
        self._places[block_id] = age

    def remove(self, block_id: int) -> None:
        """Remove a block that has a holder again."""
        age = self._places.pop(block_id)
        depths = self._ages[age].depths
        del depths[block_id]
        if not depths:
            del self._ages[age]

    def evict(self) -> int:
        """Remove and return the block to evict."""
        age = next(iter(self._ages))
        same_age = self._ages[age]
        depths, order = same_age.depths, same_age.order
        if order is None:
            order = same_age.order = sorted(depths, key=depths.__getitem__)
        while (block_id := order.pop()) not in depths:
            pass
        del depths[block_id]
        if not depths:
            del self._ages[age]
        del self._places[block_id]
        return block_id


class _SameAge:
    """Blocks last used in one step, by depth."""

    __slots__ = ("depths", "order")

    def __init__(self) -> None:
        self.depths: dict[int, int] = {}
        """By block, in the order in which they were added; never empty between two calls of the evictor."""
        self.order: list[int] | None = None
        """The blocks by depth, where none has been added since they were sorted; those removed may be in it, too."""
