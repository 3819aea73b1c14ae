"""Which cached block is evicted first."""

from collections import OrderedDict


class LRUEvictor:
    """Evicts the least recently used block first; of blocks last used in the same step, the deepest in its sequence.

    So the beginning of a prefix is kept longer than its end. Blocks are kept in buckets by step of last use and depth,
    so that adding, removing and evicting are O(1), amortized.
    """

    def __init__(self) -> None:
        self._ages: OrderedDict[int, _SameAge] = OrderedDict()  # Oldest first: steps only grow.
        self._places: dict[int, tuple[int, int]] = {}  # block_id -> (age, depth)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    def add(self, block_id: int, age: int, depth: int) -> None:
        """Add a block that has no holder any more; `age` is the current step."""
        same_age = self._ages.get(age)
        if same_age is None:
            same_age = self._ages[age] = _SameAge()
        same_age.add(block_id, depth)
        self._places[block_id] = (age, depth)

    def remove(self, block_id: int) -> None:
        """Remove a block that has a holder again."""
        age, depth = self._places.pop(block_id)
        self._ages[age].remove(block_id, depth)
        if not self._ages[age].num_blocks:
            del self._ages[age]

    def evict(self) -> int:
        """Remove and return the block to evict."""
        age, same_age = next(iter(self._ages.items()))
        block_id = same_age.pop_deepest()
        if not same_age.num_blocks:
            del self._ages[age]
        del self._places[block_id]
        return block_id


class _SameAge:
    """Blocks last used in one step, by depth."""

    __slots__ = ("_by_depth", "_max_depth", "num_blocks")

    def __init__(self) -> None:
        self._by_depth: dict[int, dict[int, None]] = {}
        self._max_depth = 0
        self.num_blocks = 0

    def add(self, block_id: int, depth: int) -> None:
        self._by_depth.setdefault(depth, {})[block_id] = None
        self._max_depth = max(self._max_depth, depth)
        self.num_blocks += 1

    def remove(self, block_id: int, depth: int) -> None:
        del self._by_depth[depth][block_id]
        self.num_blocks -= 1

    def pop_deepest(self) -> int:
        while not (deepest := self._by_depth.get(self._max_depth)):
            self._max_depth -= 1
        self.num_blocks -= 1
        return deepest.popitem()[0]
