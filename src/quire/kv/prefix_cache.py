"""A pool that remembers what computed blocks hold, also after their last holder has left."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from quire.kv.allocator import BlockAllocator
from quire.kv.content_hash import BlockHash
from quire.kv.evictor import LRUEvictor

MAX_TAIL_CANDIDATES = 64
"""of the blocks that follow one prefix, this many, the newest, are looked through for a common run of tokens"""


@dataclass(slots=True)
class BlockContent:
    """What a block is known to hold."""

    parent: BlockHash
    tokens: bytes
    """`token_bytes` of its computed tokens, eight for each"""
    depth: int
    """blocks before it in its sequence"""
    block_hash: BlockHash | None
    """None for a block that is partly full: it serves as a tail only"""


class BlockTracker:
    """Finds content by hash, and what follows a prefix by the prefix's hash. Knows nothing of holders."""

    def __init__(self) -> None:
        self._contents: dict[int, BlockContent] = {}
        self._by_hash: dict[BlockHash, int] = {}
        self._children: dict[BlockHash, dict[int, None]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    def __getitem__(self, block_id: int) -> BlockContent:
        return self._contents[block_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._contents)

    def add(self, block_id: int, content: BlockContent) -> None:
        """A block's tokens are computed, or more of them than before."""
        self.discard(block_id)
        self._contents[block_id] = content
        self._children.setdefault(content.parent, {})[block_id] = None
        if content.block_hash is not None:
            self._by_hash[content.block_hash] = block_id

    def discard(self, block_id: int) -> None:
        """The block's content is no more."""
        content = self._contents.pop(block_id, None)
        if content is None:
            return
        siblings = self._children[content.parent]
        del siblings[block_id]
        if not siblings:
            del self._children[content.parent]
        if content.block_hash is not None:
            del self._by_hash[content.block_hash]

    def find(self, block_hash: BlockHash, tokens: bytes) -> int | None:
        """The full block of this hash, if its tokens are these indeed."""
        block_id = self._by_hash.get(block_hash)
        return block_id if block_id is not None and self._contents[block_id].tokens == tokens else None

    def find_tail(self, parent: BlockHash, tokens: bytes) -> tuple[int, int] | None:
        """Of the blocks behind this prefix, the one that begins with the most of `tokens`, and how many that is."""
        best: tuple[int, int] | None = None
        for block_id in list(reversed(self._children.get(parent, {})))[:MAX_TAIL_CANDIDATES]:
            num_tokens = _common_tokens(self._contents[block_id].tokens, tokens)
            if num_tokens > (best[1] if best else 0):
                best = (block_id, num_tokens)
        return best

    def check_integrity(self) -> None:
        """The three indices agree, or AssertionError."""
        hashes = {c.block_hash: b for b, c in self._contents.items() if c.block_hash is not None}
        assert hashes == self._by_hash, "the index by hash and the contents disagree"
        children = {(c.parent, b) for b, c in self._contents.items()}
        assert children == {(p, b) for p, blocks in self._children.items() for b in blocks}, "the prefix tree is wrong"


class PrefixCachingBlockAllocator(BlockAllocator):
    """Blocks are free, owned, or cached: remembered, held by nobody, evictable."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = deque(range(num_blocks))
        self.tracker = BlockTracker()
        self.evictor = LRUEvictor()
        self.step = 0
        """the time of the cache; the manager's owner moves it on"""
        self.num_evicted_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self.evictor)

    def acquire(self, block_id: int) -> None:
        """One more holder of a cached block, whether somebody holds it already or not."""
        if self.ref_counts[block_id] == 0:
            self.evictor.remove(block_id)
        self.ref_counts[block_id] += 1

    def is_unheld(self, block_id: int) -> bool:
        """Whether acquiring this cached block takes it out of `num_free_blocks`."""
        return self.ref_counts[block_id] == 0

    def publish(self, block_id: int, content: BlockContent) -> None:
        """An owned block's tokens are computed: others may find it. An equal full block found before stays the one."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is published but not owned"
        if content.block_hash is not None and self.tracker.find(content.block_hash, content.tokens) not in (
            None,
            block_id,
        ):
            self.tracker.discard(block_id)
        else:
            self.tracker.add(block_id, content)

    def allocate(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id = self.evictor.evict()
            self.tracker.discard(block_id)
            self.num_evicted_blocks += 1
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


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many whole tokens (eight bytes each) two byte strings begin with in common."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // 8
    low, high = 0, length // 8  # the first `low` tokens are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * 8] == b[: middle * 8]:
            low = middle
        else:
            high = middle
    return low
