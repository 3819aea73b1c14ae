"""Pools of blocks: which are free, which are cached, which are owned and by how many."""

import hashlib
import secrets
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

BlockHash = bytes
ROOT_HASH: BlockHash = b""


class BlockAllocator(ABC):
    """Owns the block ids 0 to num_blocks - 1 of one tier and their reference counts.

    `allocate`, `share` and `free` change counts; a block whose count falls to 0 goes back to the pool. Only the
    BlockSpaceManager calls them. All are O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = array("q", bytes(8 * num_blocks))

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can still hand out: free ones, and cached ones nobody holds."""

    @abstractmethod
    def allocate(self) -> int:
        """A block with count 1 and unknown content. The caller has checked `num_free_blocks`."""

    def share(self, block_id: int) -> None:
        """One more holder of an owned block."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is not owned and cannot be shared"
        self.ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """One holder less; at 0 the block returns to the pool."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is freed more often than it was taken"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self._release(block_id)

    @abstractmethod
    def _release(self, block_id: int) -> None:
        """Nobody holds the block any more."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Every block is in exactly one state, or AssertionError."""


class NaiveBlockAllocator(BlockAllocator):
    """Free or owned, nothing remembered."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = deque(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        block_id = self._free.popleft()
        self.ref_counts[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        self._free.append(block_id)

    def check_integrity(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        owned = {b for b in range(self.num_blocks) if self.ref_counts[b] > 0}
        assert not free & owned, f"blocks both free and owned: {sorted(free & owned)}"
        assert len(free) + len(owned) == self.num_blocks, "a block is neither free nor owned"


class PrefixCachingBlockAllocator(BlockAllocator):
    """Remembers the tokens of full, computed blocks, also after their last holder left.

    A block's content hash is keyed BLAKE2b over its parent's hash and its own tokens, so that equal hashes mean equal
    prefixes; the tokens are compared on a hit all the same. Blocks nobody holds are evicted least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached, count 0; the next to go is first
        self._cached: dict[BlockHash, int] = {}
        self._contents: dict[int, tuple[BlockHash, bytes]] = {}  # block_id -> its hash and its tokens
        self._key = secrets.token_bytes(32)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._evictable)

    def content_hash(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """The hash of a full block of `tokens` that follows the block of hash `parent`."""
        data = array("q", tokens)
        return hashlib.blake2b(parent + data.tobytes(), digest_size=16, key=self._key).digest()

    def lookup(self, block_hash: BlockHash, tokens: Sequence[int]) -> int | None:
        """The block that holds this content, or None. Takes no hold of it."""
        block_id = self._cached.get(block_hash)
        if block_id is None or self._contents[block_id][1] != array("q", tokens).tobytes():
            return None
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more holder of a cached block, whether somebody holds it already or not."""
        self._evictable.pop(block_id, None)
        self.ref_counts[block_id] += 1

    def is_unheld(self, block_id: int) -> bool:
        """Whether acquiring this cached block takes it out of `num_free_blocks`."""
        return self.ref_counts[block_id] == 0

    def publish(self, block_id: int, block_hash: BlockHash, tokens: Sequence[int]) -> None:
        """An owned block is full and computed: others may find it. An equal block published before stays the one."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is published but not owned"
        if block_hash not in self._cached and block_id not in self._contents:
            self._cached[block_hash] = block_id
            self._contents[block_id] = (block_hash, array("q", tokens).tobytes())

    def allocate(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            block_hash, _ = self._contents.pop(block_id)
            del self._cached[block_hash]
        self.ref_counts[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        if block_id in self._contents:
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)

    def check_integrity(self) -> None:
        free, cached = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is twice in the free list"
        owned = {b for b in range(self.num_blocks) if self.ref_counts[b] > 0}
        assert not free & owned, f"blocks both free and owned: {sorted(free & owned)}"
        assert not cached & owned, f"blocks both evictable and owned: {sorted(cached & owned)}"
        assert not cached & free, f"blocks both evictable and free: {sorted(cached & free)}"
        assert len(free) + len(cached) + len(owned) == self.num_blocks, "a block is in no state"
        assert cached <= self._contents.keys(), "an evictable block has no content"
        assert not free & self._contents.keys(), "a free block has content"
        assert {h: b for b, (h, _) in self._contents.items()} == self._cached, "hashes and contents disagree"
