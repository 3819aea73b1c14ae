"""A pool that remembers what computed blocks hold, also after their last holder has left."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from quire.kv.allocator import BlockAllocator
from quire.kv.place import DEVICE, Place
from quire.kv.prefix_cache.content_hash import TOKEN_BYTES, BlockHash
from quire.kv.prefix_cache.evictor import LRUEvictor

MAX_TAIL_CANDIDATES = 64
"""of the blocks that follow one prefix, this many, the newest, are looked through for a common run of tokens"""
MAX_EVICTED_HASHES = 65536
"""hashes kept of content that is gone, so that a miss can be explained"""


@dataclass(slots=True)
class BlockContent:
    """What a block is known to hold."""

    group: int
    """KV cache group: the same tokens have other keys and values in each"""
    parent: BlockHash
    tokens: bytes
    """its computed tokens, as HashChain.content gives them"""
    depth: int
    """blocks before it in its sequence"""
    block_hash: BlockHash | None
    """None for a block that is partly full: it serves as a tail only"""
    num_hits: int = 0
    """lookups that found it"""
    salt: str = ""
    """of its content key"""

    @property
    def num_tokens(self) -> int:
        """Computed tokens in it."""
        return len(self.tokens) // TOKEN_BYTES


class BlockTracker:
    """Finds content by hash, and what follows a prefix by the prefix's hash. Knows nothing of holders."""

    def __init__(self, num_groups: int, on_change: Callable[[int, BlockHash], None], tier: int = DEVICE) -> None:
        """`on_change` is called with the depth and the hash of each full block that is added or discarded."""
        self._on_change = on_change
        self._tier = tier
        self._contents: dict[int, BlockContent] = {}
        self._by_hash: list[dict[BlockHash, Place]] = [{} for _ in range(num_groups)]
        self._children: list[dict[BlockHash, dict[int, None]]] = [{} for _ in range(num_groups)]
        self._beginnings: dict[tuple[str, bytes], dict[BlockHash, None]] = {}
        """first blocks of group 0: salt and tokens -> roots"""
        self.touched: set[int] | None = None
        """blocks whose content has changed, while somebody watches; it is theirs to empty"""

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    def __getitem__(self, block_id: int) -> BlockContent:
        return self._contents[block_id]

    def contents(self) -> Iterable[BlockContent]:
        """All that is known, in no order."""
        return self._contents.values()

    def block_ids(self) -> Iterable[int]:
        """The blocks whose content is known, in the order of `contents`."""
        return self._contents.keys()

    def get(self, block_id: int) -> BlockContent | None:
        """What the block holds; None if that is not known."""
        return self._contents.get(block_id)

    def count_hits(self, block_ids: Iterable[int]) -> None:
        """A lookup uses these blocks; those that are still being computed do not count."""
        for block_id in block_ids:
            content = self._contents.get(block_id)
            if content is not None:
                content.num_hits += 1
        if self.touched is not None:
            self.touched.update(block_ids)

    def add(self, block_id: int, content: BlockContent) -> None:
        """A block's tokens are computed, or more of them than before."""
        self.discard(block_id)
        self._contents[block_id] = content
        if self.touched is not None:
            self.touched.add(block_id)
        self._children[content.group].setdefault(content.parent, {})[block_id] = None
        if content.block_hash is not None:
            self._by_hash[content.group][content.block_hash] = Place(self._tier, block_id)
            self._on_change(content.depth, content.block_hash)
            if content.depth == 0 and content.group == 0:
                self._beginnings.setdefault((content.salt, content.tokens), {})[content.parent] = None

    def discard(self, block_id: int) -> None:
        """The block's content is no more."""
        content = self._contents.pop(block_id, None)
        if content is None:
            return
        if self.touched is not None:
            self.touched.add(block_id)
        children = self._children[content.group]
        del children[content.parent][block_id]
        if not children[content.parent]:
            del children[content.parent]
        if content.block_hash is not None:
            del self._by_hash[content.group][content.block_hash]
            self._on_change(content.depth, content.block_hash)
            if content.depth == 0 and content.group == 0:
                beginning = content.salt, content.tokens
                del self._beginnings[beginning][content.parent]
                if not self._beginnings[beginning]:
                    del self._beginnings[beginning]

    def find(self, group: int, block_hash: BlockHash, tokens: bytes) -> Place | None:
        """The full block of this hash, if its tokens are these indeed."""
        place = self._by_hash[group].get(block_hash)
        return place if place is not None and self._contents[place[1]].tokens == tokens else None

    def find_tail(self, group: int, parent: BlockHash, tokens: bytes) -> tuple[int, int] | None:
        """Of the blocks behind this prefix, the one that begins with the most of `tokens`, and how many that is."""
        best: tuple[int, int] | None = None
        for block_id in islice(reversed(self._children[group].get(parent, {})), MAX_TAIL_CANDIDATES):
            num_tokens = _common_tokens(self._contents[block_id].tokens, tokens)
            if num_tokens > (best[1] if best else 0):
                best = (block_id, num_tokens)
        return best

    def other_root(self, root: BlockHash, salt: str, tokens: bytes) -> BlockHash | None:
        """Another root (another content key of this salt) under which a sequence begins with the full block `tokens`.
        What is there under other salts is nobody's business, not even as a reason why something else was not found."""
        return next((other for other in reversed(self._beginnings.get((salt, tokens), {})) if other != root), None)

    def check_integrity(self) -> None:
        """The indices agree with the contents, or AssertionError."""
        contents = self._contents.items()
        hashes = {(c.group, c.block_hash): b for b, c in contents if c.block_hash is not None}
        indexed = {(group, h): p.block_id for group, index in enumerate(self._by_hash) for h, p in index.items()}
        assert hashes == indexed, "the index by hash and the contents disagree"
        children = {(c.group, c.parent, b) for b, c in contents}
        tree = {(g, p, b) for g, index in enumerate(self._children) for p, blocks in index.items() for b in blocks}
        assert children == tree, "the prefix tree is wrong"
        full = [c for _, c in contents if c.block_hash is not None]
        beginnings = {((c.salt, c.tokens), c.parent) for c in full if c.depth == 0 and c.group == 0}
        assert beginnings == {(t, p) for t, roots in self._beginnings.items() for p in roots}, "beginnings are wrong"


class PrefixCachingBlockAllocator(BlockAllocator):
    """Blocks are free, owned, or cached: remembered, held by nobody, evictable."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        on_evict: Callable[[int, BlockContent], None],
        on_change: Callable[[int, BlockHash], None],
        tier: int = DEVICE,
    ) -> None:
        """`on_evict` is called with a block and the content that it is about to lose, `on_change` by the tracker."""
        super().__init__(num_blocks)
        self._free = deque(range(num_blocks))
        self.tracker = BlockTracker(num_groups, on_change, tier)
        self.evictor = LRUEvictor()
        self.step = 0
        """the time of the cache; the manager moves it on"""
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self.evictor)

    @property
    def num_cached_blocks(self) -> int:
        return len(self.evictor)

    def acquire(self, block_id: int) -> None:
        """One more holder of a cached block, whether somebody holds it already or not."""
        if self.ref_counts[block_id] == 0:
            self.evictor.remove(block_id)
        self.ref_counts[block_id] += 1

    def forget(self, block_id: int) -> None:
        """The block's content is not to be found any more, whoever holds it."""
        self.tracker.discard(block_id)
        if self.ref_counts[block_id] == 0:
            self.evictor.remove(block_id)
            self._free.append(block_id)

    def allocate(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id = self.evictor.evict()
            self._on_evict(block_id, self.tracker[block_id])
            self.tracker.discard(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        if block_id in self.tracker:
            self.evictor.add(block_id, self.step, self.tracker[block_id].depth)
        else:
            self._free.append(block_id)

    def check_integrity(self) -> None:
        free = set(self._free)
        cached = {b for b in range(self.num_blocks) if b in self.evictor}
        owned = {b for b in range(self.num_blocks) if self.ref_counts[b] > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & owned, f"blocks both free and owned: {sorted(free & owned)}"
        assert not cached & owned, f"blocks both evictable and owned: {sorted(cached & owned)}"
        assert not cached & free, f"blocks both evictable and free: {sorted(cached & free)}"
        assert len(free) + len(cached) + len(owned) == self.num_blocks, "a block is in no state"
        assert len(cached) == len(self.evictor), "the evictor holds a block that does not exist"
        assert all(b in self.tracker for b in cached), "an evictable block has no content"
        assert not any(b in self.tracker for b in free), "a free block has content"
        self.tracker.check_integrity()


class EvictedHashes:
    """Remembers of which content it is known that it was there once; the latest MAX_EVICTED_HASHES."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def add(self, block_hash: BlockHash) -> None:
        """This content is gone."""
        self._hashes[block_hash] = None
        if len(self._hashes) > MAX_EVICTED_HASHES:
            self._hashes.popitem(last=False)

    def discard(self, block_hash: BlockHash) -> None:
        """It is there again."""
        self._hashes.pop(block_hash, None)


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many whole tokens two byte strings begin with in common."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // TOKEN_BYTES
    low, high = 0, length // TOKEN_BYTES  # the first `low` tokens are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
