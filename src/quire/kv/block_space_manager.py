"""Keeps every sequence's block tables over the pools of blocks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from quire.common.batch import BlockIds, BlockPairs, SlotCopy
from quire.common.faults import fault_point
from quire.config.kv_cache import KVCacheConfig
from quire.kv.block_table import BlockTable
from quire.kv.content_hash import NO_KEY, ContentKey, HashChain
from quire.kv.hit_lengths import HitLengths
from quire.kv.managers import make_managers
from quire.kv.pins import PinnedPrefix, Pins
from quire.kv.prefix_cache import BlockContent, PrefixCachingBlockAllocator
from quire.kv.prefix_lookup import PrefixHit, PrefixLookup
from quire.kv.stats import PrefixCacheStats
from quire.kv.tiers import Tiers


class AllocStatus(Enum):
    """Whether a new sequence has room: now, once others have finished, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class _SequenceBlocks:
    """One sequence's hold on the cache."""

    tables: list[BlockTable]
    """one per KV cache group"""
    num_full: int = 0
    """blocks at the beginning that are computed, and that others can find"""
    num_registered: int = 0
    """blocks from `num_full` to here are announced as being computed by this sequence"""
    num_writable: int = 0
    """tokens it can hold without another block or a copy on write, as far as is known"""
    num_scheduled: int = 0
    """tokens computed once step `scheduled_step` has succeeded"""
    scheduled_step: int = -1
    on_host: bool = False
    """swapped out: the tables name blocks of the host tier"""


class BlockSpaceManager:
    """Gives sequences blocks, shares them, takes them back. Knows token ids and counts, no tensors.

    Who mutates: the scheduler through `allocate`, `append`, `swap_out`, `swap_in`, `free` and `forget`; commit through
    `publish`, `fork` and `settle`. Verbs come in pairs: a question, which changes nothing, and the act, which may only
    follow a yes.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_prefix_caching: bool,
        watermark: float = 0.01,
        pinned_fraction: float = 0.25,
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.watermark_blocks = int(watermark * config.num_blocks)
        self.stats = PrefixCacheStats()
        self.step = 0
        self.managers = make_managers(config)
        self._token_groups = [group for group, manager in enumerate(self.managers) if manager.holds_tokens]
        self._sequences: dict[int, _SequenceBlocks] = {}
        self._chains: dict[int, HashChain] = {}
        self._copies: dict[int, list[SlotCopy]] = {}  # by sequence, until its next tokens are computed
        self._copy_sources: Counter[int] = Counter()  # their sources, which are held so long
        self.hit_lengths = HitLengths()
        self.tiers = Tiers(
            config,
            caching=enable_prefix_caching and bool(self._token_groups),
            stats=self.stats,
            on_change=self.hit_lengths.changed,
        )
        self.pool, self.host = self.tiers.pool, self.tiers.host
        self.cache: PrefixCachingBlockAllocator | None = None
        lookup = None
        if self.tiers.caches is not None:
            self.cache, host = self.tiers.caches
            lookup = PrefixLookup(
                config, self.managers, self.cache.tracker, host.tracker, self.tiers.evicted, self._join
            )
            self.lookup = lookup
        self.pins = Pins(config, int(pinned_fraction * config.num_blocks), self.cache, lookup)

    # New sequences

    def look_up(
        self, seq_id: int, token_ids: Sequence[int], key: ContentKey = NO_KEY, max_tokens: int | None = None
    ) -> PrefixHit:
        """The longest prefix in the cache; at least one token is left, since its logits are what comes next, and all
        behind the first `max_tokens`."""
        max_tokens = len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
        if self.cache is None:
            places: tuple[list[int], ...] = ([],) * self.num_groups
            return PrefixHit(seq_id, token_ids, max_tokens, first=(0,) * self.num_groups, places=places)
        chain = self._chains.get(seq_id)
        if chain is None:
            chain = self._chains[seq_id] = self.lookup.chain(token_ids, key)
        chain.extend(len(token_ids) // self.block_size, token_ids)
        return self.lookup.find(seq_id, chain, token_ids, max_tokens)

    def num_cached_tokens(
        self, seq_id: int, token_ids: Sequence[int], key: ContentKey = NO_KEY, max_tokens: int | None = None
    ) -> int:
        """The tokens in whole blocks that `look_up` finds; O(1) while nothing that this depends on has changed."""
        limit = len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
        num_blocks = self.hit_lengths.get(seq_id, limit)
        if num_blocks is None:
            hit = self.look_up(seq_id, token_ids, key, max_tokens)
            num_blocks = hit.num_blocks
            if hit.is_settled and self.cache is not None:
                self.hit_lengths.remember(seq_id, self._chains[seq_id], limit, num_blocks)
        return num_blocks * self.block_size

    def can_allocate(self, hit: PrefixHit) -> AllocStatus:
        """Whether the sequence has room for all its tokens, besides a reserve for those that run."""
        held = [place for places in hit.places for place in places if place >= 0 and self.pool.ref_counts[place] > 0]
        needed = self.config.blocks_to_hold(len(hit.token_ids))
        pinned_by_others = self.pins.num_blocks - sum(place in self.pins for place in held)
        if needed > self.pool.num_blocks - pinned_by_others:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed - len(held) + self._reserve <= self.pool.num_free_blocks else AllocStatus.LATER

    def allocate(self, hit: PrefixHit) -> int:
        """Start a sequence with the blocks of its prefix; returns the tokens that need not be computed.

        Behind the last block found whole, the longest run of tokens that another block begins with is copied.
        """
        seq_id, num_tokens = hit.seq_id, len(hit.token_ids)
        assert seq_id not in self._sequences, f"sequence {seq_id} has blocks already"
        fault_point("blocks.allocate", seq_id)
        if self.tiers.caches is None:
            self._sequences[seq_id] = _SequenceBlocks([BlockTable() for _ in hit.places])
            return 0
        device, host = self.tiers.caches
        for place in [place for places in hit.places for place in places]:
            if place >= 0:  # before anything else is given out: that could take it
                device.acquire(place)
            else:
                host.acquire(~place)
        for places in hit.places:
            device.tracker.count_hits([place for place in places if place >= 0])
        tables = [
            BlockTable([place if place >= 0 else self.tiers.copy_in(~place) for place in places], first)
            for places, first in zip(hit.places, hit.first, strict=True)
        ]
        blocks = self._sequences[seq_id] = _SequenceBlocks(tables, hit.num_ready_blocks)
        num_tail_tokens = self._copy_tail(hit, blocks)
        num_cached_tokens = hit.num_blocks * self.block_size + num_tail_tokens
        self._count(hit, num_tail_tokens)
        chain, blocks.num_registered = self._chains[seq_id], num_tokens // self.block_size
        if hit.num_ready_blocks < blocks.num_registered:  # other sequences with one of these blocks have the first too
            self.hit_lengths.changed(hit.num_ready_blocks, chain.block(hit.num_ready_blocks)[0])
        for index in range(hit.num_ready_blocks, blocks.num_registered):
            self.lookup.computing.setdefault(chain.block(index)[0], seq_id)
        return num_cached_tokens

    @property
    def _reserve(self) -> int:
        """Blocks left to those that run, if any does."""
        return self.watermark_blocks if any(not blocks.on_host for blocks in self._sequences.values()) else 0

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def _join(self, owner: int, group: int, index: int) -> int | None:
        """The block another sequence will have computed by the end of the step being planned."""
        blocks = self._sequences[owner]
        table, end = blocks.tables[group], (index + 1) * self.block_size
        is_coming = blocks.scheduled_step == self.step and end <= blocks.num_scheduled and index >= table.first
        return table[index] if is_coming else None

    def _copy_tail(self, hit: PrefixHit, blocks: _SequenceBlocks) -> int:
        """Copy the longest run of tokens that a block behind the prefix begins with; returns its length.

        Every group must have such a block, and the pool a block to spare for each copy and each source nobody holds.
        """
        assert self.cache is not None
        chain, start, num_tokens = self._chains[hit.seq_id], hit.num_blocks * self.block_size, len(hit.token_ids)
        wanted = chain.content(start, min(start + self.block_size, hit.max_tokens), hit.token_ids)
        sources = self.lookup.find_tails(chain, hit.num_blocks, wanted)
        missing = self.config.blocks_to_hold(num_tokens) - sum(len(table.ids()) for table in blocks.tables)
        unheld = sum(self.pool.ref_counts[block_id] == 0 for _, block_id, _ in sources)
        if not sources or missing + unheld > self.pool.num_free_blocks:
            return 0
        num_copied = min(n for _, _, n in sources)
        self.cache.tracker.count_hits([block_id for _, block_id, _ in sources])
        for _, block_id, _ in sources:
            self.cache.acquire(block_id)
        for group, block_id, _ in sources:
            table = blocks.tables[group]
            table.append(self.pool.allocate())
            self._copy(hit.seq_id, SlotCopy(group, block_id, table[hit.num_blocks], num_copied))
        return num_copied

    def _count(self, hit: PrefixHit, num_tail_tokens: int) -> None:
        """What was found and missed, the first time a sequence is looked up."""
        chain, num_queried = self._chains[hit.seq_id], hit.max_tokens
        if chain.looked_up:
            return
        chain.looked_up = True
        self.stats.num_queried_tokens += num_queried
        for source, count in (hit.num_by_source or {}).items():
            self.stats.num_block_hit_tokens[source] += count * self.block_size
        self.stats.num_tail_hit_tokens += num_tail_tokens
        num_cached = hit.num_blocks * self.block_size + num_tail_tokens
        for reason, count in self.lookup.explain(chain, num_cached, num_queried).items():
            self.stats.num_missed_tokens[reason] += count

    # Running sequences

    def has_room(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the sequence is known to hold `num_tokens` tokens as it is; if not, `can_append` finds out."""
        return num_tokens <= self._sequences[seq_id].num_writable

    def can_append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether the sequence can hold `num_tokens` tokens in all and write those that are not computed yet."""
        blocks = self._sequences[seq_id]
        needed = self._num_missing(blocks, num_tokens)
        needed += len(self._shared_write_groups(blocks, num_computed_tokens, num_tokens))
        return needed <= self.pool.num_free_blocks

    def append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Grow the tables to hold `num_tokens` tokens in all; done twice it changes nothing more.

        A block that is about to be written and that others hold as well is exchanged for a copy of its own
        (copy-on-write). Only the last of the blocks so far can be: full blocks are never written again.
        """
        fault_point("blocks.append", seq_id)
        blocks = self._sequences[seq_id]
        for group in self._shared_write_groups(blocks, num_computed_tokens, num_tokens):
            table, index = blocks.tables[group], num_computed_tokens // self.block_size
            source = table[index]
            table.replace(index, self.pool.allocate())  # the hold on the source passes to the copy
            self._copy(seq_id, SlotCopy(group, source, table[index], num_computed_tokens % self.block_size))
        pairs = list(zip(blocks.tables, self.managers, strict=True))
        for table, manager in pairs:
            for _ in range(manager.num_blocks(num_tokens) - table.num_blocks):
                table.append(self.pool.allocate())
        blocks.num_writable = min([manager.max_tokens(table.num_blocks) for table, manager in pairs])
        blocks.num_scheduled, blocks.scheduled_step = num_tokens, self.step

    def _num_missing(self, blocks: _SequenceBlocks, num_tokens: int) -> int:
        """Blocks that the tables lack for `num_tokens` tokens."""
        pairs = zip(blocks.tables, self.managers, strict=True)
        return sum([max(0, manager.num_blocks(num_tokens) - table.num_blocks) for table, manager in pairs])

    def _shared_write_groups(self, blocks: _SequenceBlocks, num_computed: int, num_tokens: int) -> list[int]:
        """The groups whose partly computed block the next tokens would write into while others hold it.

        Those that hold it only to copy its first slots do so before anything is written.
        """
        index = num_computed // self.block_size
        if num_computed % self.block_size == 0 or num_tokens == num_computed:
            return []
        counts, sources = self.pool.ref_counts, self._copy_sources
        tables = blocks.tables
        last = [(g, tables[g][index]) for g in self._token_groups if index < tables[g].num_blocks]
        return [g for g, block_id in last if counts[block_id] - sources[block_id] > 1]

    def _copy(self, seq_id: int, copy: SlotCopy) -> None:
        """Note a copy whose source is held for it."""
        self._copies.setdefault(seq_id, []).append(copy)
        self._copy_sources[copy.src_block] += 1

    def _release_copies(self, seq_id: int) -> None:
        for copy in self._copies.pop(seq_id, ()):
            self.pool.free(copy.src_block)
            self._copy_sources[copy.src_block] -= 1
            if not self._copy_sources[copy.src_block]:
                del self._copy_sources[copy.src_block]

    def copies(self, seq_ids: Sequence[int]) -> tuple[SlotCopy, ...]:
        """Copies due before these sequences' next tokens are computed, until `publish` says that they are."""
        return tuple([copy for seq_id in seq_ids if seq_id in self._copies for copy in self._copies[seq_id]])

    def publish(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed, and the copies due are done.

        Others can find the full blocks from now on. A block whose content is there already is given back, and the
        other one shared; a block that has slid out of its group's window is given back as well.
        """
        blocks = self._sequences[seq_id]
        if self._copies:
            self._release_copies(seq_id)
        if num_computed_tokens < (blocks.num_full + 1) * self.block_size:
            return
        num_full = num_computed_tokens // self.block_size
        if self.cache is not None:
            chain = self._chains[seq_id]
            chain.extend(num_full, token_ids)
            for index in range(blocks.num_full, num_full):
                block_hash, tokens = chain.block(index)
                self._unregister(seq_id, blocks, index, index + 1)
                self.tiers.evicted.discard(block_hash)
                for group in self._token_groups:
                    table = blocks.tables[group]
                    if index >= table.first:
                        content = BlockContent(group, chain.parent(index), tokens, index, block_hash)
                        content.salt = chain.key.cache_salt
                        self._publish(table, content)
        blocks.num_full = num_full
        for table, manager in zip(blocks.tables, self.managers, strict=True):
            first = manager.first_needed(num_computed_tokens)
            for block_id in table.slide(first) if first > table.first else ():
                self.pool.free(block_id)

    def _publish(self, table: BlockTable, content: BlockContent) -> None:
        assert self.cache is not None
        index, block_id, tracker = content.depth, table[content.depth], self.cache.tracker
        if content.block_hash is not None:
            other = tracker.find(content.group, content.block_hash, content.tokens)
            if other is not None and other != block_id:
                self.cache.acquire(other)
                table.replace(index, other)
                tracker.discard(block_id)
                self.pool.free(block_id)
                return
        tracker.add(block_id, content)

    def publish_tail(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Let others copy out of the last, partly full block, as far as it is computed."""
        blocks = self._sequences[seq_id]
        start = blocks.num_full * self.block_size
        if self.cache is None or seq_id in self._copies or num_computed_tokens <= start:  # copies due: a step failed
            return
        chain = self._chains[seq_id]
        assert num_computed_tokens < start + self.block_size, f"sequence {seq_id} has a full block not published"
        content = chain.content(start, num_computed_tokens, token_ids)
        for group in self._token_groups:
            self._publish(
                blocks.tables[group], BlockContent(group, chain.parent(blocks.num_full), content, blocks.num_full, None)
            )

    def _unregister(self, seq_id: int, blocks: _SequenceBlocks, start: int, end: int) -> None:
        """Blocks `start` to `end` are not being computed by this sequence any more."""
        for index in range(start, min(end, blocks.num_registered)):
            block_hash = self._chains[seq_id].block(index)[0]
            if self.lookup.computing.get(block_hash) == seq_id:
                del self.lookup.computing[block_hash]

    def fork(self, parent_id: int, child_id: int) -> None:
        """Start a sequence that shares all of another's blocks, the partly full last one too. Copies nothing."""
        parent = self._sequences[parent_id]
        assert child_id not in self._sequences, f"sequence {child_id} has blocks already"
        assert parent_id not in self._copies, f"sequence {parent_id} waits for copies and cannot be forked yet"
        assert not parent.on_host, f"sequence {parent_id} is swapped out and cannot be forked"
        child = _SequenceBlocks([table.copy() for table in parent.tables], parent.num_full, parent.num_full)
        for table in child.tables:
            for block_id in table.ids():
                self.pool.share(block_id)
        parent.num_writable = 0  # what it writes next may be shared now
        self._sequences[child_id] = child
        if self.cache is not None:
            self._chains[child_id] = self._chains[parent_id].fork()

    # Tiers

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host tier has room for all blocks of these sequences."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        if any(seq_id in self._copies for seq_id in seq_ids):  # what they hold is not all there yet
            return False
        return len(self._holds(sequences)) <= self.host.num_free_blocks

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Move the sequences to the host tier, shared blocks once, in the coming step."""
        fault_point("blocks.swap_out", seq_ids[0])
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        for seq_id, blocks in zip(seq_ids, sequences, strict=True):
            self._unregister(seq_id, blocks, blocks.num_full, blocks.num_registered)
            blocks.on_host, blocks.num_writable = True, 0
        self.tiers.move_out([table for blocks in sequences for table in blocks.tables])

    def can_swap_in(self, seq_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether the device tier has room for the sequences, grown to `num_tokens` each, each with a last block of its
        own, besides a reserve, as far as there can be one."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        tables = [table for blocks in sequences for table in blocks.tables]
        last_blocks = [table[table.num_blocks - 1] for table in tables if table.num_blocks]
        needed = len(self._holds(sequences)) + sum(self._num_missing(blocks, num_tokens) for blocks in sequences)
        needed += len(last_blocks) - len(set(last_blocks))
        available, free = self.pool.num_blocks - self.pins.num_blocks, self.pool.num_free_blocks
        return needed <= free and min(needed + len(tables) + self._reserve, available) <= free

    def swap_in(self, seq_ids: Sequence[int]) -> None:
        """Move the sequences back to the device tier, in the coming step."""
        fault_point("blocks.swap_in", seq_ids[0])
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        for blocks in sequences:
            blocks.on_host = False
        self.tiers.move_in([table for blocks in sequences for table in blocks.tables])

    def _holds(self, sequences: Sequence[_SequenceBlocks]) -> Counter[int]:
        """The blocks these sequences hold, and how often."""
        return Counter(block_id for blocks in sequences for table in blocks.tables for block_id in table.ids())

    def take_transfers(self) -> tuple[BlockPairs, BlockPairs]:
        """What the coming step is to copy out, (device, host), and then back, (host, device)."""
        return self.tiers.take_transfers()

    def settle(self) -> None:
        """The step has succeeded: its transfers are done."""
        self.tiers.settle()

    def revert(self) -> None:
        """The step has failed: what it was to spill to the host tier may not be there."""
        self.tiers.revert()

    # Pinned prefixes

    def check_pin(self, token_ids: Sequence[int], key: ContentKey = NO_KEY) -> None:
        """Raise RequestError if pinning these tokens would take more blocks than are allowed to be pinned."""
        self.pins.check(token_ids, key)

    def pin(self, token_ids: Sequence[int], key: ContentKey = NO_KEY) -> PinnedPrefix:
        """Keep what the device tier has of these tokens until `unpin`. Raises RequestError if that is too much."""
        return self.pins.pin(token_ids, key)

    def unpin(self, pin_id: int) -> None:
        """Let a pinned prefix go; it stays cached like any other. Raises RequestError for an unknown pin."""
        self.pins.unpin(pin_id)

    # The end

    def free(self, seq_id: int) -> None:
        """Take the sequence's blocks back; its hashes stay, for when it comes again."""
        blocks = self._sequences.pop(seq_id)
        self._release_copies(seq_id)
        self._unregister(seq_id, blocks, blocks.num_full, blocks.num_registered)
        tier = self.host if blocks.on_host else self.pool
        for table in blocks.tables:
            for block_id in reversed(table.ids()):
                tier.free(block_id)

    def forget(self, seq_id: int) -> None:
        """The sequence will not come again."""
        self._chains.pop(seq_id, None)
        self.hit_lengths.forget(seq_id)

    def advance(self) -> None:
        """A step begins: blocks released from here on count as used later than those before."""
        self.step += 1
        self.tiers.advance(self.step)

    def block_tables(self, seq_id: int) -> tuple[BlockIds, ...]:
        """Snapshots of the sequence's tables, one per group."""
        tables = self._sequences[seq_id].tables
        return (tables[0].snapshot(),) if len(tables) == 1 else tuple([table.snapshot() for table in tables])

    def holdings(self) -> Iterator[tuple[int, bool, list[BlockTable]]]:
        """Every sequence that has blocks, whether those are of the host tier, and its tables, to be read only."""
        return ((seq_id, blocks.on_host, blocks.tables) for seq_id, blocks in self._sequences.items())

    def gain(self, seq_ids: Sequence[int]) -> tuple[int, int]:
        """Blocks that only these sequences hold, and all that they hold."""
        holds = self._holds([self._sequences[seq_id] for seq_id in seq_ids])
        return sum(self.pool.ref_counts[block_id] == count for block_id, count in holds.items()), len(holds)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences and pins hold."""
        return self.pool.num_blocks - self.pool.num_free_blocks

    def check_integrity(self) -> None:
        """Every block in one state, every count equal to the entries, copies, pins and transfers that name it, every
        hash that of its tokens; or AssertionError."""
        others = {
            False: Counter(b for block_ids in self.pins.block_ids.values() for b in block_ids),
            True: Counter(self.tiers.held),
        }
        others[False] += self._copy_sources
        for tier, on_host in ((self.pool, False), (self.host, True)):
            tier.check_integrity()
            entries = self._holds([blocks for blocks in self._sequences.values() if blocks.on_host is on_host])
            counts = {b: c for b, c in enumerate(tier.ref_counts) if c > 0}
            assert entries + others[on_host] == counts, f"counts {counts} differ from the holders' {dict(entries)}"
        for cache in self.tiers.caches or ():
            for content in cache.tracker.contents():
                if content.block_hash is not None:
                    expected = self.lookup.hasher.child(content.parent, content.tokens)
                    assert content.block_hash == expected, "a cached block's hash is not that of its tokens"
        if self.cache is not None:
            self._check_computing()

    def _check_computing(self) -> None:
        for block_hash, seq_id in self.lookup.computing.items():
            blocks, chain = self._sequences[seq_id], self._chains[seq_id]
            announced = [chain.block(index)[0] for index in range(blocks.num_full, blocks.num_registered)]
            assert block_hash in announced, f"sequence {seq_id} is said to compute a block that it does not"
