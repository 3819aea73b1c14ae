"""Keeps every sequence's block tables over the pools of blocks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum

from quire.common.batch import BlockIds, SlotCopy, Transfer
from quire.common.faults import fault_point
from quire.config.kv_cache import KVCacheConfig
from quire.kv.block_table import BlockTable
from quire.kv.managers import make_managers
from quire.kv.place import DEVICE, HOST, Place
from quire.kv.prefix_cache.changes import PrefixChanges
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentHasher, ContentKey
from quire.kv.prefix_cache.hit_lengths import HitLengths
from quire.kv.prefix_cache.lookup import PrefixHit
from quire.kv.prefix_cache.pins import Pins
from quire.kv.prefix_cache.sharing import PrefixSharing
from quire.kv.prefix_cache.stats import PrefixCacheStats
from quire.kv.sequence_blocks import SequenceBlocks
from quire.kv.slot_copies import SlotCopies
from quire.kv.tiers import Tiers


class AllocStatus(Enum):
    """Whether a new sequence has room: now, once others have finished, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockSpaceManager:
    """Gives sequences blocks, shares them and frees them. It knows token ids and numbers, no tensors.

    Who mutates: the scheduler through `allocate`, `append`, `swap_out`, `swap_in`, `free` and `forget`; commit through
    `publish`, `fork`, `shrink` and `settle`. Many methods come in pairs: a question, such as `can_append`, changes
    nothing, and the action, `append`, may only follow a positive answer.
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
        self._sequences: dict[int, SequenceBlocks] = {}
        hit_lengths = HitLengths()
        self.tiers = Tiers(config, self.stats, hit_lengths.changed)
        self.pool = self.tiers.pools[DEVICE]
        self._copies = SlotCopies(self.pool)
        self._open_steps: set[int] = set()  # planned, and neither settled nor reverted
        self.prefixes: PrefixSharing | None = None
        if enable_prefix_caching and self._token_groups:
            self.prefixes = PrefixSharing(config, self.managers, self.tiers, hit_lengths, self.stats, self._join)
        self.pins = Pins(config, int(pinned_fraction * config.num_blocks), self.prefixes)

    def share_hashes(self, key: bytes) -> PrefixChanges:
        """Hash with this key from now on, as other engines do, and return what collects the changes. Nothing has been
        cached or looked up before."""
        trackers = [pool.tracker for pool in self.tiers.pools if pool.num_blocks]
        if self.prefixes is None:
            return PrefixChanges((), 0)
        assert not self.prefixes.chains
        assert not any(tracker.block_ids() for tracker in trackers)
        self.prefixes.lookup.hasher = ContentHasher(key)
        whole = [group for group in self._token_groups if self.managers[group].is_prefix_closed]
        return PrefixChanges(trackers, (whole or self._token_groups)[0])

    # New sequences

    def look_up(
        self, seq_id: int, token_ids: Sequence[int], key: ContentKey = NO_KEY, max_tokens: int | None = None
    ) -> PrefixHit:
        """The longest prefix in the cache, within the first `max_tokens` tokens and without the last token of all: its
        logits choose the next one."""
        max_tokens = _max_tokens(token_ids, max_tokens)
        if self.prefixes is None:
            places: tuple[list[Place], ...] = ([],) * self.num_groups
            return PrefixHit(seq_id, token_ids, max_tokens, places=places)
        return self.prefixes.look_up(seq_id, token_ids, key, max_tokens)

    def num_cached_tokens(
        self, seq_id: int, token_ids: Sequence[int], key: ContentKey = NO_KEY, max_tokens: int | None = None
    ) -> int:
        """The tokens in whole blocks that `look_up` finds; O(1) while nothing that this depends on has changed."""
        if self.prefixes is None:
            return 0
        max_tokens = _max_tokens(token_ids, max_tokens)
        return self.prefixes.num_blocks(seq_id, token_ids, key, max_tokens) * self.block_size

    def can_allocate(self, hit: PrefixHit) -> AllocStatus:
        """Whether there are blocks for all its tokens, besides a reserve for the running sequences."""
        held = [block_id for block_id in hit.device_blocks if self.pool.ref_counts[block_id] > 0]
        needed = self.config.blocks_to_hold(len(hit.token_ids))
        pinned_by_others = self.pins.num_blocks - sum([block_id in self.pins for block_id in held])
        if needed > self.pool.num_blocks - pinned_by_others:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed - len(held) + self._reserve <= self.pool.num_free_blocks else AllocStatus.LATER

    def allocate(self, hit: PrefixHit) -> int:
        """Start a sequence with the blocks of its prefix; returns the tokens that need not be computed.

        Behind the last block found whole, the longest run of tokens that another block begins with is copied.
        """
        seq_id = hit.seq_id
        assert seq_id not in self._sequences, f"sequence {seq_id} has blocks already"
        fault_point("blocks.allocate", seq_id)
        if self.prefixes is None:
            self._sequences[seq_id] = SequenceBlocks([BlockTable() for _ in hit.places])
            return 0
        for places in hit.places:
            for tier, block_id in places:  # before anything else is given out: that could take it
                self.tiers.pools[tier].acquire(block_id)
        self.prefixes.cache.tracker.count_hits(hit.device_blocks)
        tables = [
            BlockTable([self.tiers.bring(place) for place in places], first)
            for places, first in zip(hit.places, hit.first, strict=True)
        ]
        blocks = self._sequences[seq_id] = SequenceBlocks(tables, hit.num_ready_blocks)
        num_tail_tokens = self._copy_tail(hit, blocks, self.prefixes)
        self.prefixes.begin(hit, blocks, num_tail_tokens)
        return hit.num_blocks * self.block_size + num_tail_tokens

    @property
    def _reserve(self) -> int:
        """Number of blocks that are left to the running sequences, if there are any."""
        return self.watermark_blocks if any(blocks.tier == DEVICE for blocks in self._sequences.values()) else 0

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def _join(self, owner: int, group: int, index: int) -> Place | None:
        """The block that another sequence will have computed by the end of the step being planned."""
        blocks = self._sequences[owner]
        table, end = blocks.tables[group], (index + 1) * self.block_size
        is_coming = blocks.scheduled_step in self._open_steps and end <= blocks.num_scheduled and index >= table.first
        return Place(DEVICE, table[index]) if is_coming else None

    def _copy_tail(self, hit: PrefixHit, blocks: SequenceBlocks, prefixes: PrefixSharing) -> int:
        """Copy the longest run of tokens that a block behind the prefix begins with; returns its length.

        Each group must have such a block, and the pool a spare block for each copy and for each source without holders.
        """
        sources = prefixes.find_tails(hit)
        missing = self.config.blocks_to_hold(len(hit.token_ids)) - sum(len(table.ids()) for table in blocks.tables)
        unheld = sum(self.pool.ref_counts[block_id] == 0 for _, block_id, _ in sources)
        if not sources or missing + unheld > self.pool.num_free_blocks:
            return 0
        num_copied = min(n for _, _, n in sources)
        prefixes.cache.tracker.count_hits([block_id for _, block_id, _ in sources])
        for _, block_id, _ in sources:
            prefixes.cache.acquire(block_id)
        for group, block_id, _ in sources:
            table = blocks.tables[group]
            table.extend([self.pool.allocate()])
            self._copies.add(hit.seq_id, SlotCopy(group, block_id, table[hit.num_blocks], num_copied))
        return num_copied

    # Running sequences

    def has_room(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the sequence is known to have room for this many tokens; if not, `can_append` finds out."""
        return num_tokens <= self._sequences[seq_id].num_writable

    def can_append(self, seq_id: int, num_computed_tokens: int, num_tokens: int, num_left: int = 0) -> bool:
        """Whether the sequence can hold `num_tokens` tokens in all and write those that are not computed yet, so that
        `num_left` blocks for each kind of layer remain for others."""
        blocks = self._sequences[seq_id]
        needed = self._num_missing(blocks, num_tokens)
        needed += len(self._shared_write_groups(blocks, num_computed_tokens))
        return needed + num_left * len(self.managers) <= self.pool.num_free_blocks

    def append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Grow the tables to hold `num_tokens` tokens in all; done twice it changes nothing more.

        A block that is about to be written and that others hold as well is exchanged for a copy of its own
        (copy-on-write). Only the last of the blocks so far can be: full blocks are never written again.
        """
        fault_point("blocks.append", seq_id)
        blocks = self._sequences[seq_id]
        for group in self._shared_write_groups(blocks, num_computed_tokens):
            table, index = blocks.tables[group], num_computed_tokens // self.block_size
            source = table[index]
            table.replace(index, self.pool.allocate())  # the hold on the source passes to the copy
            self._copies.add(seq_id, SlotCopy(group, source, table[index], num_computed_tokens % self.block_size))
        most: list[int] = []
        for table, manager in zip(blocks.tables, self.managers, strict=True):
            num_blocks = max(table.num_blocks, manager.num_blocks(num_tokens))
            if num_blocks > table.num_blocks:
                table.extend([self.pool.allocate() for _ in range(num_blocks - table.num_blocks)])
            most.append(manager.max_tokens(num_blocks))
        blocks.num_writable = min(most)
        blocks.num_scheduled, blocks.scheduled_step = num_tokens, self.step

    def shrink(self, seq_id: int, num_tokens: int) -> None:
        """Free the blocks behind those of the sequence's first `num_tokens` tokens, which drafts had."""
        for block_id in self._sequences[seq_id].cut(self.managers, num_tokens):
            self.pool.free(block_id)

    def _num_missing(self, blocks: SequenceBlocks, num_tokens: int) -> int:
        """Blocks that the tables lack for `num_tokens` tokens."""
        pairs = zip(blocks.tables, self.managers, strict=True)
        return sum([max(0, manager.num_blocks(num_tokens) - table.num_blocks) for table, manager in pairs])

    def _shared_write_groups(self, blocks: SequenceBlocks, num_computed: int) -> list[int]:
        """The groups whose partly computed block the next tokens would write into while others hold it.

        Those that hold it only to copy its first slots do so before anything is written. Those that have joined it in
        this step, after tokens were given to the sequence, read what this step writes.
        """
        index, offset = divmod(num_computed, self.block_size)
        if not offset or blocks.scheduled_step == self.step:
            return []
        counts, sources = self.pool.ref_counts, self._copies.sources
        last = [(g, blocks.tables[g][index]) for g in self._token_groups]
        return [g for g, block_id in last if counts[block_id] - sources[block_id] > 1]

    def publish(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed, in a step that has been settled.

        Others can find the full blocks from now on. A block whose content is there already is given back, and the
        other one shared; a block that has slid out of its group's window is given back as well.
        """
        blocks = self._sequences[seq_id]
        if num_computed_tokens < (blocks.num_full + 1) * self.block_size:
            return
        num_full = num_computed_tokens // self.block_size
        if self.prefixes is not None:
            self.prefixes.publish(seq_id, blocks, token_ids, num_full)
        blocks.num_full = num_full
        for table, manager in zip(blocks.tables, self.managers, strict=True):
            first = manager.first_needed(num_computed_tokens)
            for block_id in table.slide(first) if first > table.first else ():
                self.pool.free(block_id)

    def publish_tail(self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Let others copy the computed part of the last, partly full block."""
        blocks = self._sequences[seq_id]
        is_computed = num_computed_tokens > blocks.num_full * self.block_size and seq_id not in self._copies
        if self.prefixes is not None and is_computed:  # copies are left where a step has failed
            self.prefixes.publish_tail(seq_id, blocks, token_ids, num_computed_tokens)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Start a sequence that shares all of another's blocks, the partly full last one too. Copies nothing."""
        parent = self._sequences[parent_id]
        assert child_id not in self._sequences, f"sequence {child_id} has blocks already"
        assert parent_id not in self._copies, f"sequence {parent_id} waits for copies and cannot be forked yet"
        assert parent.tier == DEVICE, f"sequence {parent_id} is swapped out and cannot be forked"
        child = SequenceBlocks([table.copy() for table in parent.tables], parent.num_full)
        for table in child.tables:
            for block_id in table.ids():
                self.pool.share(block_id)
        parent.num_writable = 0  # what it writes next may be shared now
        self._sequences[child_id] = child
        if self.prefixes is not None:
            self.prefixes.fork(parent_id, child_id)

    # Tiers

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host tier has room for all blocks of these sequences."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        if any(seq_id in self._copies for seq_id in seq_ids):  # what they hold is not all there yet
            return False
        return len(self._holds(sequences)) <= self.tiers.pools[HOST].num_free_blocks

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Move the sequences to the host tier, shared blocks once, in the coming step."""
        fault_point("blocks.swap_out", seq_ids[0])
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        for seq_id, blocks in zip(seq_ids, sequences, strict=True):
            self._withdraw(seq_id, blocks)
            blocks.tier, blocks.num_writable = HOST, 0
        self.tiers.move([table for blocks in sequences for table in blocks.tables], DEVICE, HOST)

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
            blocks.tier = DEVICE
        self.tiers.move([table for blocks in sequences for table in blocks.tables], HOST, DEVICE)

    def _holds(self, sequences: Sequence[SequenceBlocks]) -> Counter[int]:
        """The blocks these sequences hold, and how often."""
        return Counter(block_id for blocks in sequences for table in blocks.tables for block_id in table.ids())

    def take_transfers(self, step: int) -> tuple[Transfer, ...]:
        """The copies between tiers planned since this was last called: this step does them, in order."""
        return self.tiers.take_transfers(step)

    def take_copies(self, seq_ids: Sequence[int], step: int) -> tuple[SlotCopy, ...]:
        """The copies that this step does before it computes the next tokens of these sequences."""
        return self._copies.take(seq_ids, step)

    def settle(self, step: int) -> None:
        """The step has succeeded: its transfers and copies are done."""
        self._open_steps.discard(step)
        self._copies.settle(step)
        self.tiers.settle(step)

    def revert(self, step: int) -> None:
        """The step has failed: its copies wait for another step, and what it was to spill is not there."""
        self._open_steps.discard(step)
        self._copies.revert(step)
        self.tiers.revert(step)

    # The end

    def free(self, seq_id: int) -> None:
        """Free the sequence's blocks. Its hashes stay until `forget`, since it may start again."""
        blocks = self._sequences.pop(seq_id)
        self._copies.drop(seq_id)
        self._withdraw(seq_id, blocks)
        pool = self.tiers.pools[blocks.tier]
        for table in blocks.tables:
            for block_id in reversed(table.ids()):
                pool.free(block_id)

    def _withdraw(self, seq_id: int, blocks: SequenceBlocks) -> None:
        """Withdraw the announcement of the blocks that the sequence was to compute."""
        if self.prefixes is not None:
            self.prefixes.withdraw(seq_id, blocks, blocks.num_full, blocks.num_announced)

    def forget(self, seq_id: int) -> None:
        """Free the blocks of a sequence that has ended, if it has any, and forget it."""
        if seq_id in self._sequences:
            self.free(seq_id)
        if self.prefixes is not None:
            self.prefixes.forget(seq_id)

    def forget_cached(self) -> None:
        """Forget the content of all blocks that nothing holds: no later prompt finds it. No batch may be in flight."""
        for pool in self.tiers.pools:
            pool.forget_cached()

    def advance(self, *, is_open: bool = True) -> None:
        """Begin a step: blocks freed from now on count as used later than those before. One not open is not settled."""
        self.step += 1
        if is_open:
            self._open_steps.add(self.step)
        self.tiers.advance(self.step)

    def block_tables(self, seq_id: int) -> tuple[BlockIds, ...]:
        """Snapshots of the sequence's tables, one per group."""
        tables = self._sequences[seq_id].tables
        return (tables[0].snapshot(),) if len(tables) == 1 else tuple([table.snapshot() for table in tables])

    def holdings(self) -> Iterator[tuple[int, int, list[BlockTable]]]:
        """Every sequence that has blocks, their tier, and its tables, to be read only."""
        return ((seq_id, blocks.tier, blocks.tables) for seq_id, blocks in self._sequences.items())

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
        pinned = Counter(b for block_ids in self.pins.block_ids.values() for b in block_ids) + self._copies.sources
        for tier, pool in enumerate(self.tiers.pools):
            pool.check_integrity()
            entries = self._holds([blocks for blocks in self._sequences.values() if blocks.tier == tier])
            others = self.tiers.holds(tier) + (pinned if tier == DEVICE else Counter())
            counts = {b: c for b, c in enumerate(pool.ref_counts) if c > 0}
            assert entries + others == counts, f"counts {counts} differ from the holders' {dict(entries)}"
        if self.prefixes is not None:
            self.prefixes.check_integrity(self._sequences)


def _max_tokens(token_ids: Sequence[int], max_tokens: int | None) -> int:
    return len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
