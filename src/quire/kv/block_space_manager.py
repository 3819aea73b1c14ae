"""Keeps every sequence's block tables over the pool of blocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.batch import BlockIds, BlockPairs, SlotCopy
from quire.config.kv_cache import KVCacheConfig
from quire.kv.allocator import BlockAllocator, NaiveBlockAllocator
from quire.kv.block_table import BlockTable
from quire.kv.content_hash import BlockHash, ContentHasher, HashChain, token_bytes
from quire.kv.prefix_cache import BlockContent, PrefixCachingBlockAllocator


class AllocStatus(Enum):
    """Whether a new sequence has room: now, once others have finished, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class PrefixCacheStats:
    """What lookups found, in tokens, since the engine was made. A request computed again looks up again."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_tail_hit_tokens: int = 0
    """of those hit, the ones copied out of a block that goes on differently"""


@dataclass(slots=True)
class _SequenceBlocks:
    """One sequence's hold on the cache."""

    tables: list[BlockTable]
    """one per KV cache group"""
    num_published: int = 0
    """full blocks that others can find"""
    on_host: bool = False
    """swapped out: the tables name blocks of the host tier"""
    copies: list[SlotCopy] = field(default_factory=list)
    """to be done before the sequence's next tokens are computed; their sources are held until then"""


class BlockSpaceManager:
    """Gives sequences blocks, shares them, takes them back. Knows token ids and counts, no tensors.

    Who mutates: the scheduler through `allocate`, `append`, `fork`, `free` and `forget`; commit through `publish`.
    Verbs come in pairs: a `can_` question, which changes nothing, and the act, which may only follow a yes.
    """

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool, watermark: float = 0.01) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.watermark_blocks = int(watermark * config.num_blocks)
        self.prefix_cache = PrefixCachingBlockAllocator(config.num_blocks) if enable_prefix_caching else None
        self.pool: BlockAllocator = self.prefix_cache or NaiveBlockAllocator(config.num_blocks)
        self.host = NaiveBlockAllocator(config.num_host_blocks)
        self.stats = PrefixCacheStats()
        self._hasher = ContentHasher()
        self._sequences: dict[int, _SequenceBlocks] = {}
        self._chains: dict[int, HashChain] = {}

    # New sequences

    def can_allocate(self, seq_id: int, token_ids: Sequence[int]) -> AllocStatus:
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
            hits = self._cached_prefix(seq_id, token_ids)
            held_by_others = sum(not self.prefix_cache.is_unheld(b) for blocks in hits for b in blocks)
        return AllocStatus.OK if needed - held_by_others <= free else AllocStatus.LATER

    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int:
        """Start a sequence with the blocks of its longest cached prefix; returns the tokens in them.

        Behind the last block found whole, the longest run of tokens that another block begins with is copied. At least
        one token is left to compute: its logits are what comes next.
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} has blocks already"
        blocks = _SequenceBlocks([BlockTable() for _ in range(self.num_groups)])
        self._sequences[seq_id] = blocks
        if self.prefix_cache is None:
            return 0
        hits = self._cached_prefix(seq_id, token_ids)
        for block_ids in hits:
            for table, block_id in zip(blocks.tables, block_ids, strict=True):
                self.prefix_cache.acquire(block_id)
                table.append(block_id)
        blocks.num_published = len(hits)
        num_tail_tokens = self._copy_tail(seq_id, token_ids, blocks)
        num_cached_tokens = len(hits) * self.block_size + num_tail_tokens
        self.stats.num_queried_tokens += len(token_ids)
        self.stats.num_hit_tokens += num_cached_tokens
        self.stats.num_tail_hit_tokens += num_tail_tokens
        return num_cached_tokens

    def _chain(self, seq_id: int) -> HashChain:
        chain = self._chains.get(seq_id)
        if chain is None:
            chain = self._chains[seq_id] = HashChain(self._hasher, self.block_size)
        return chain

    def _cached_prefix(self, seq_id: int, token_ids: Sequence[int]) -> list[list[int]]:
        """For each block of the longest cached prefix, the block id in every group."""
        assert self.prefix_cache is not None
        chain, tracker = self._chain(seq_id), self.prefix_cache.tracker
        hits: list[list[int]] = []
        for start in range(0, len(token_ids) - self.block_size, self.block_size):  # a full block, and a token after it
            tokens = token_bytes(token_ids[start : start + self.block_size])
            block_hash = chain.block(len(hits), token_ids)
            found = [tracker.find(_in_group(block_hash, group), tokens) for group in range(self.num_groups)]
            if None in found:
                break
            hits.append([block_id for block_id in found if block_id is not None])
        return hits

    def _copy_tail(self, seq_id: int, token_ids: Sequence[int], blocks: _SequenceBlocks) -> int:
        """Copy the longest run of tokens that a block behind the prefix begins with; returns its length.

        Every group must have such a block, and the pool a block to spare for each copy and each source nobody holds.
        """
        assert self.prefix_cache is not None
        start = blocks.num_published * self.block_size
        wanted = token_bytes(token_ids[start : min(start + self.block_size, len(token_ids) - 1)])
        parent = self._chain(seq_id).parent(blocks.num_published)
        found = [self.prefix_cache.tracker.find_tail(_in_group(parent, g), wanted) for g in range(self.num_groups)]
        sources = [block for block in found if block is not None]
        missing = self._num_blocks_for(len(token_ids)) * self.num_groups - sum(t.num_blocks for t in blocks.tables)
        unheld = sum(self.prefix_cache.is_unheld(block_id) for block_id, _ in sources)
        if len(sources) < self.num_groups or missing + unheld > self.pool.num_free_blocks:
            return 0
        num_tokens = min(n for _, n in sources)
        for block_id, _ in sources:
            self.prefix_cache.acquire(block_id)
        for group, (table, (block_id, _)) in enumerate(zip(blocks.tables, sources, strict=True)):
            table.append(self.pool.allocate())
            blocks.copies.append(SlotCopy(group, block_id, table[blocks.num_published], num_tokens))
        return num_tokens

    # Running sequences

    def can_append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether the sequence can hold `num_tokens` tokens in all and write those that are not computed yet."""
        blocks = self._sequences[seq_id]
        wanted = self._num_blocks_for(num_tokens)
        needed = sum(max(0, wanted - table.num_blocks) for table in blocks.tables)
        needed += len(self._shared_write_groups(blocks, num_computed_tokens, num_tokens))
        return needed <= self.pool.num_free_blocks

    def append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Grow the tables to hold `num_tokens` tokens in all; done twice it changes nothing more.

        A block that is about to be written and that others hold as well is exchanged for a copy of its own
        (copy-on-write). Only the last of the blocks so far can be: full blocks are never written again.
        """
        blocks = self._sequences[seq_id]
        for group in self._shared_write_groups(blocks, num_computed_tokens, num_tokens):
            table, index = blocks.tables[group], num_computed_tokens // self.block_size
            source = table[index]
            table.replace(index, self.pool.allocate())  # the hold on the source passes to the copy
            blocks.copies.append(SlotCopy(group, source, table[index], num_computed_tokens % self.block_size))
        for table in blocks.tables:
            while table.num_blocks * self.block_size < num_tokens:
                table.append(self.pool.allocate())

    def _shared_write_groups(self, blocks: _SequenceBlocks, num_computed: int, num_tokens: int) -> list[int]:
        """The groups whose partly computed block the next tokens would write into while others hold it."""
        index = num_computed // self.block_size
        if num_computed % self.block_size == 0 or num_tokens == num_computed:
            return []
        tables = enumerate(blocks.tables)
        return [g for g, table in tables if index < table.num_blocks and self.pool.ref_counts[table[index]] > 1]

    def copies(self, seq_id: int) -> tuple[SlotCopy, ...]:
        """Copies due before the sequence's next tokens are computed, until `publish` says that they are."""
        return tuple(self._sequences[seq_id].copies)

    def publish(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The tokens up to here are computed: due copies are done, and others may find the full blocks."""
        blocks = self._sequences[seq_id]
        self._release_copies(blocks)
        if self.prefix_cache is None:
            return
        while (blocks.num_published + 1) * self.block_size <= num_computed_tokens:
            index = blocks.num_published
            self._publish_block(
                seq_id, blocks, index, token_ids[index * self.block_size :][: self.block_size], token_ids
            )
            blocks.num_published += 1

    def publish_tail(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Let others copy out of the last, partly full block, as far as it is computed."""
        blocks = self._sequences[seq_id]
        if blocks.copies:  # a step failed: what was to be copied into it is not there
            return
        tokens = token_ids[blocks.num_published * self.block_size : num_computed_tokens]
        if self.prefix_cache is not None and tokens:
            self._publish_block(seq_id, blocks, blocks.num_published, tokens, token_ids)

    def _publish_block(
        self, seq_id: int, blocks: _SequenceBlocks, index: int, tokens: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        assert self.prefix_cache is not None
        chain, full = self._chain(seq_id), len(tokens) == self.block_size
        block_hash = chain.block(index, token_ids) if full else None
        content = token_bytes(tokens)
        for group, table in enumerate(blocks.tables):
            own = None if block_hash is None else _in_group(block_hash, group)
            parent = _in_group(chain.parent(index), group)
            self.prefix_cache.publish(table[index], BlockContent(parent, content, index, own))

    def _release_copies(self, blocks: _SequenceBlocks) -> None:
        for copy in blocks.copies:
            self.pool.free(copy.src_block)
        blocks.copies.clear()

    def fork(self, parent_id: int, child_id: int) -> None:
        """Start a sequence that shares all of another's blocks, the partly full last one too. Copies nothing."""
        parent = self._sequences[parent_id]
        assert child_id not in self._sequences, f"sequence {child_id} has blocks already"
        assert not parent.copies, f"sequence {parent_id} waits for copies and cannot be forked yet"
        child = _SequenceBlocks([table.copy() for table in parent.tables], parent.num_published)
        for table in child.tables:
            for block_id in table.ids():
                self.pool.share(block_id)
        self._sequences[child_id] = child
        self._chains[child_id] = self._chain(parent_id).fork()

    # Swapping

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host tier has room for all blocks of these sequences."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        if any(blocks.copies for blocks in sequences):  # what they hold is not all there yet
            return False
        return self._num_distinct_blocks(sequences) <= self.host.num_free_blocks

    def swap_out(self, seq_ids: Sequence[int]) -> BlockPairs:
        """Move the sequences to the host tier, shared blocks once; returns what is to be copied, (device, host)."""
        return self._move([self._sequences[seq_id] for seq_id in seq_ids], self.pool, self.host)

    def can_swap_in(self, seq_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether the device tier has room for the sequences, grown to `num_tokens` each, besides the reserve."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        wanted = self._num_blocks_for(num_tokens)
        needed = self._num_distinct_blocks(sequences)
        needed += sum(max(0, wanted - table.num_blocks) + 1 for blocks in sequences for table in blocks.tables)
        others_run = any(not blocks.on_host for blocks in self._sequences.values())
        needed = min(needed + (self.watermark_blocks if others_run else 0), self.pool.num_blocks)
        return needed <= self.pool.num_free_blocks

    def swap_in(self, seq_ids: Sequence[int]) -> BlockPairs:
        """Move the sequences back to the device tier; returns what is to be copied, (host, device)."""
        return self._move([self._sequences[seq_id] for seq_id in seq_ids], self.host, self.pool)

    def _num_distinct_blocks(self, sequences: Sequence[_SequenceBlocks]) -> int:
        return len({block_id for blocks in sequences for table in blocks.tables for block_id in table.ids()})

    def _move(self, sequences: Sequence[_SequenceBlocks], source: BlockAllocator, target: BlockAllocator) -> BlockPairs:
        moved: dict[int, int] = {}
        for blocks in sequences:
            blocks.on_host = target is self.host
            for table in blocks.tables:
                for index, block_id in enumerate(table.ids()):
                    if block_id in moved:
                        target.share(moved[block_id])
                    else:
                        moved[block_id] = target.allocate()
                    table.replace(index, moved[block_id])
                    source.free(block_id)
        return tuple(moved.items())

    # The end

    def free(self, seq_id: int) -> None:
        """Take the sequence's blocks back; its hashes stay, for when it comes again."""
        blocks = self._sequences.pop(seq_id)
        self._release_copies(blocks)
        tier = self.host if blocks.on_host else self.pool
        for table in blocks.tables:
            for block_id in reversed(table.ids()):
                tier.free(block_id)

    def forget(self, seq_id: int) -> None:
        """The sequence will not come again."""
        self._chains.pop(seq_id, None)

    def advance(self) -> None:
        """A step begins: blocks released from here on count as used later than those before."""
        if self.prefix_cache is not None:
            self.prefix_cache.step += 1

    def block_tables(self, seq_id: int) -> tuple[BlockIds, ...]:
        """Snapshots of the sequence's tables, one per group."""
        return tuple(table.snapshot() for table in self._sequences[seq_id].tables)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.pool.num_blocks - self.pool.num_free_blocks

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_integrity(self) -> None:
        """Every block in one state, every count equal to the entries and copies that name it, or AssertionError."""
        for tier, on_host in ((self.pool, False), (self.host, True)):
            tier.check_integrity()
            sequences = [blocks for blocks in self._sequences.values() if blocks.on_host is on_host]
            entries = Counter(b for blocks in sequences for table in blocks.tables for b in table.ids())
            entries += Counter(copy.src_block for blocks in sequences for copy in blocks.copies)
            counts = {b: c for b, c in enumerate(tier.ref_counts) if c > 0}
            assert entries == counts, f"reference counts {counts} differ from the block tables' {dict(entries)}"


def _in_group(block_hash: BlockHash, group: int) -> BlockHash:
    """The same tokens have other keys and values in every KV cache group."""
    return block_hash + bytes([group])
