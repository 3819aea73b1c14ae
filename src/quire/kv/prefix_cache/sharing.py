"""How sequences find blocks that others have computed or are computing, and publish their own."""

from collections.abc import Mapping, Sequence

from quire.config.kv_cache import KVCacheConfig
from quire.kv.block_table import BlockTable
from quire.kv.managers.base import GroupManager
from quire.kv.place import DEVICE
from quire.kv.prefix_cache.content_hash import ContentKey, HashChain
from quire.kv.prefix_cache.hit_lengths import HitLengths
from quire.kv.prefix_cache.lookup import Join, PrefixHit, PrefixLookup
from quire.kv.prefix_cache.stats import PrefixCacheStats
from quire.kv.prefix_cache.tracker import BlockContent
from quire.kv.sequence_blocks import SequenceBlocks
from quire.kv.tiers import Tiers


class PrefixSharing:
    """Keeps the hash chain of each sequence, from its first lookup until it is forgotten, and the prefix cache's index.

    The BlockSpaceManager owns it and calls it. It changes block tables only by replacing a block with an equal one.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        managers: Sequence[GroupManager],
        tiers: Tiers,
        hit_lengths: HitLengths,
        stats: PrefixCacheStats,
        join: Join,
    ) -> None:
        self.cache = tiers.pools[DEVICE]
        self.lookup = PrefixLookup(config, managers, [pool.tracker for pool in tiers.pools], tiers.evicted, join)
        self.chains: dict[int, HashChain] = {}
        self._block_size = config.block_size
        self._token_groups = [group for group, manager in enumerate(managers) if manager.holds_tokens]
        self._tiers = tiers
        self._hit_lengths = hit_lengths
        self._stats = stats

    def look_up(self, seq_id: int, token_ids: Sequence[int], key: ContentKey, max_tokens: int) -> PrefixHit:
        """The longest prefix in the cache, within the first `max_tokens` tokens."""
        chain = self.chains.get(seq_id)
        if chain is None:
            chain = self.chains[seq_id] = self.lookup.chain(token_ids, key)
        chain.extend(len(token_ids) // self._block_size, token_ids)
        return self.lookup.find(seq_id, chain, token_ids, max_tokens)

    def adopt(self, seq_id: int, chain: HashChain) -> None:
        """A new sequence's hashes are known: they were computed with the same key, and `chain` is its own now."""
        self.chains[seq_id] = chain

    def num_blocks(self, seq_id: int, token_ids: Sequence[int], key: ContentKey, max_tokens: int) -> int:
        """The whole blocks that `look_up` finds; O(1) while nothing that this depends on has changed."""
        num_blocks = self._hit_lengths.get(seq_id, max_tokens)
        if num_blocks is None:
            hit = self.look_up(seq_id, token_ids, key, max_tokens)
            num_blocks = hit.num_blocks
            if hit.is_settled:
                self._hit_lengths.remember(seq_id, self.chains[seq_id], max_tokens, num_blocks)
        return num_blocks

    def find_tails(self, hit: PrefixHit) -> list[tuple[int, int, int]]:
        """For each group, the block that continues like the tokens behind a prefix, as PrefixLookup.find_tails."""
        chain, start = self.chains[hit.seq_id], hit.num_blocks * self._block_size
        wanted = chain.content(start, min(start + self._block_size, hit.max_tokens), hit.token_ids)
        return self.lookup.find_tails(chain, hit.num_blocks, wanted)

    def begin(self, hit: PrefixHit, blocks: SequenceBlocks, num_tail_tokens: int) -> None:
        """A sequence starts behind a prefix: announce the blocks that it will compute, and count what it found."""
        chain, start = self.chains[hit.seq_id], hit.num_ready_blocks
        self._count(hit, chain, num_tail_tokens)
        blocks.num_announced = len(hit.token_ids) // self._block_size
        if start < blocks.num_announced:  # other sequences with any of these blocks have the first one too
            self._hit_lengths.changed(start, chain.block(start)[0])
        for index in range(start, blocks.num_announced):
            self.lookup.computing.setdefault(chain.block(index)[0], hit.seq_id)

    def _count(self, hit: PrefixHit, chain: HashChain, num_tail_tokens: int) -> None:
        """Add what was found and missed to the counters, the first time that a sequence starts."""
        if chain.looked_up:
            return
        chain.looked_up = True
        self._stats.num_queried_tokens += hit.max_tokens
        for source, count in (hit.num_by_source or {}).items():
            self._stats.num_block_hit_tokens[source] += count * self._block_size
        self._stats.num_tail_hit_tokens += num_tail_tokens
        if not self._tiers.evicted.most:
            return
        num_cached = hit.num_blocks * self._block_size + num_tail_tokens
        for reason, count in self.lookup.explain(chain, num_cached, hit.max_tokens).items():
            self._stats.num_missed_tokens[reason] += count

    def publish(self, seq_id: int, blocks: SequenceBlocks, token_ids: Sequence[int], num_full: int) -> None:
        """The first `num_full` blocks are computed: let others find those that are still in the tables."""
        chain, evicted, start = self.chains[seq_id], self._tiers.evicted, blocks.num_full
        chain.extend(num_full, token_ids)
        if start < blocks.num_announced:
            self.withdraw(seq_id, blocks, start, num_full)
        salt = chain.key.cache_salt
        for index in range(start, num_full):
            block_hash, tokens = chain.block(index)
            if evicted.most:
                evicted.discard(block_hash)
            for group in self._token_groups:
                table = blocks.tables[group]
                if index >= table.first:
                    self._publish(table, BlockContent(group, chain.parent(index), tokens, index, block_hash, 0, salt))

    def publish_tail(self, seq_id: int, blocks: SequenceBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Let others copy out of the last, partly full block, as far as it is computed."""
        chain, start = self.chains[seq_id], blocks.num_full * self._block_size
        assert num_computed < start + self._block_size, f"sequence {seq_id} has a full block not published"
        content = chain.content(start, num_computed, token_ids)
        for group in self._token_groups:
            tail = BlockContent(group, chain.parent(blocks.num_full), content, blocks.num_full, None)
            self._publish(blocks.tables[group], tail)

    def _publish(self, table: BlockTable, content: BlockContent) -> None:
        index, block_id, tracker = content.depth, table[content.depth], self.cache.tracker
        if content.block_hash is not None:
            other = tracker.find(content.group, content.block_hash, content.tokens)
            if other is not None and other.block_id != block_id:
                self.cache.acquire(other.block_id)
                table.replace(index, other.block_id)
                tracker.discard(block_id)
                self.cache.free(block_id)
                return
        tracker.add(block_id, content)

    def withdraw(self, seq_id: int, blocks: SequenceBlocks, start: int, end: int) -> None:
        """Blocks `start` to `end` are not being computed by this sequence any more."""
        chain, computing = self.chains[seq_id], self.lookup.computing
        for index in range(start, min(end, blocks.num_announced)):
            block_hash = chain.parent(index + 1)
            if computing.get(block_hash) == seq_id:
                del computing[block_hash]

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a forked sequence a hash chain of its own."""
        self.chains[child_id] = self.chains[parent_id].fork()

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self.chains.pop(seq_id, None)
        self._hit_lengths.forget(seq_id)

    def check_integrity(self, sequences: Mapping[int, SequenceBlocks]) -> None:
        """Every hash is that of its tokens, and sequences announce only what they compute; or AssertionError."""
        for pool in self._tiers.pools:
            for content in pool.tracker.contents():
                if content.block_hash is not None:
                    expected = self.lookup.hasher.child(content.parent, content.tokens)
                    assert content.block_hash == expected, "a cached block's hash is not that of its tokens"
        for block_hash, seq_id in self.lookup.computing.items():
            blocks, chain = sequences[seq_id], self.chains[seq_id]
            announced = [chain.block(index)[0] for index in range(blocks.num_full, blocks.num_announced)]
            assert block_hash in announced, f"sequence {seq_id} is said to compute a block that it does not"
