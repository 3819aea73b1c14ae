"""Keeps every sequence's block tables over the pool of blocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.batch import BlockIds
from quire.config.kv_cache import KVCacheConfig
from quire.kv.allocator import ROOT_HASH, BlockAllocator, BlockHash, NaiveBlockAllocator, PrefixCachingBlockAllocator
from quire.kv.block_table import BlockTable


class AllocStatus(Enum):
    """Whether a new sequence has room: now, once others have finished, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class _SequenceBlocks:
    """One sequence's hold on the cache: a table per KV cache group, and the chain of hashes of its full blocks."""

    tables: list[BlockTable]
    hashes: list[BlockHash] = field(default_factory=list)
    """of the published blocks, in order; group g's hash of a block is derived from the chain's"""


class BlockSpaceManager:
    """Gives sequences blocks, shares them, takes them back. Knows token ids and counts, no tensors.

    Who mutates: the scheduler through `allocate`, `append` and `free`; commit through `publish`. Verbs come in pairs: a
    `can_` question, which changes nothing, and the act, which may only follow a yes.
    """

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool, watermark: float = 0.01) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.watermark_blocks = int(watermark * config.num_blocks)
        self.prefix_cache = PrefixCachingBlockAllocator(config.num_blocks) if enable_prefix_caching else None
        self.pool: BlockAllocator = self.prefix_cache or NaiveBlockAllocator(config.num_blocks)
        self._sequences: dict[int, _SequenceBlocks] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    # New sequences

    def can_allocate(self, token_ids: Sequence[int]) -> AllocStatus:
        """Whether a sequence of these tokens has room for all of them, besides a reserve for those that run."""
        needed = self._num_blocks_for(len(token_ids)) * self.num_groups
        if needed > self.pool.num_blocks:
            return AllocStatus.NEVER
        reserve = self.watermark_blocks if self._sequences else 0
        free = self.pool.num_free_blocks - reserve
        if needed <= free:
            return AllocStatus.OK
        held_by_others = 0
        if self.prefix_cache is not None:
            hits = self._cached_prefix(token_ids)[0]
            held_by_others = sum(not self.prefix_cache.is_unheld(b) for blocks in hits for b in blocks)
        return AllocStatus.OK if needed - held_by_others <= free else AllocStatus.LATER

    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int:
        """Start a sequence with the blocks of its longest cached prefix; returns the tokens in them.

        At least one token is left to compute: its logits are what comes next.
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} has blocks already"
        blocks = _SequenceBlocks([BlockTable() for _ in range(self.num_groups)])
        self._sequences[seq_id] = blocks
        if self.prefix_cache is None:
            return 0
        hits, blocks.hashes = self._cached_prefix(token_ids)
        for block_ids in hits:
            for table, block_id in zip(blocks.tables, block_ids, strict=True):
                self.prefix_cache.acquire(block_id)
                table.append(block_id)
        num_cached_tokens = len(hits) * self.block_size
        self.num_queried_tokens += len(token_ids)
        self.num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def _cached_prefix(self, token_ids: Sequence[int]) -> tuple[list[list[int]], list[BlockHash]]:
        """For each block of the longest cached prefix: the block id in every group; and the chain's hashes."""
        assert self.prefix_cache is not None
        hits: list[list[int]] = []
        hashes: list[BlockHash] = []
        for start in range(0, len(token_ids) - self.block_size, self.block_size):  # a full block, and a token after it
            tokens = token_ids[start : start + self.block_size]
            block_hash = self.prefix_cache.content_hash(hashes[-1] if hashes else ROOT_HASH, tokens)
            block_ids = [self.prefix_cache.lookup(h, tokens) for h in self._group_hashes(block_hash)]
            if None in block_ids:
                break
            hits.append([block_id for block_id in block_ids if block_id is not None])
            hashes.append(block_hash)
        return hits, hashes

    def _group_hashes(self, block_hash: BlockHash) -> list[BlockHash]:
        """A block of tokens has other keys and values in every group."""
        return [block_hash + bytes([group]) for group in range(self.num_groups)]

    # Running sequences

    def can_append(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the sequence's tables can grow to hold `num_tokens` tokens in all."""
        return self._num_new_blocks(seq_id, num_tokens) <= self.pool.num_free_blocks

    def append(self, seq_id: int, num_tokens: int) -> None:
        """Grow the tables to hold `num_tokens` tokens in all; done twice it changes nothing more."""
        for table in self._sequences[seq_id].tables:
            while table.num_blocks * self.block_size < num_tokens:
                table.append(self.pool.allocate())

    def publish(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Let others find the sequence's full blocks of computed tokens."""
        if self.prefix_cache is None:
            return
        blocks = self._sequences[seq_id]
        while (end := (len(blocks.hashes) + 1) * self.block_size) <= num_computed_tokens:
            index = len(blocks.hashes)
            tokens = token_ids[end - self.block_size : end]
            parent = blocks.hashes[-1] if blocks.hashes else ROOT_HASH
            block_hash = self.prefix_cache.content_hash(parent, tokens)
            blocks.hashes.append(block_hash)
            for table, group_hash in zip(blocks.tables, self._group_hashes(block_hash), strict=True):
                self.prefix_cache.publish(table[index], group_hash, tokens)

    def free(self, seq_id: int) -> None:
        """The sequence is gone. Its last blocks are the first to be evicted: a prefix is of more use than its end."""
        for table in self._sequences.pop(seq_id).tables:
            for block_id in reversed(table.ids()):
                self.pool.free(block_id)

    def block_tables(self, seq_id: int) -> tuple[BlockIds, ...]:
        """Snapshots of the sequence's tables, one per group."""
        return tuple(table.snapshot() for table in self._sequences[seq_id].tables)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.pool.num_blocks - self.pool.num_free_blocks

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_new_blocks(self, seq_id: int, num_tokens: int) -> int:
        wanted = self._num_blocks_for(num_tokens)
        return sum(max(0, wanted - table.num_blocks) for table in self._sequences[seq_id].tables)

    def check_integrity(self) -> None:
        """Every block in one state, every count equal to the table entries that name it, or AssertionError."""
        self.pool.check_integrity()
        entries = Counter(b for s in self._sequences.values() for table in s.tables for b in table.ids())
        counts = {b: c for b, c in enumerate(self.pool.ref_counts) if c > 0}
        assert entries == counts, f"reference counts {counts} differ from the block tables' {dict(entries)}"
