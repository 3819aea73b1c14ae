"""Bugs planted in scheduling and block accounting: the checks that every other test relies on must see each of them."""

import random
from collections import deque
from dataclasses import replace

import pytest

from quire.engine.commit import Committer
from quire.engine.scheduler import Scheduler
from quire.kv.allocator import BlockAllocator, NaiveBlockAllocator
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.block_table import BlockTable
from quire.kv.content_hash import ContentHasher, HashChain
from quire.kv.evictor import LRUEvictor
from quire.kv.prefix_cache import BlockTracker, PrefixCachingBlockAllocator

from .fake import Harness, expected_output


def check_workload(seed: int) -> None:
    """A random workload in a small cache: outputs, order of finishing, integrity after every step."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=rng.randint(8, 14),
        num_groups=rng.randint(1, 2),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.randint(3, 24),
        caching=seed % 4 != 0,
        num_host_blocks=rng.choice([0, 4, 12]),
        preemption_mode=rng.choice([None, "swap", "recompute"]),
        failing_steps={rng.randint(2, 20) for _ in range(2)},
    )
    requests = []
    for _ in range(8):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]
        requests.append((harness.add(prompt, rng.randint(1, 6)), prompt))
        if rng.random() < 0.5:
            harness.step()
    harness.run()
    for group, prompt in requests:
        assert harness.output(group) == expected_output(prompt, group.params.max_tokens)
    assert requests[0][0].metrics.num_preemptions == 0


def check_forks() -> None:
    """Copy-on-write at the block manager, which no request asks for yet."""
    harness = Harness(num_blocks=8)
    blocks = harness.blocks
    blocks.allocate(0, [1] * 6)
    blocks.append(0, 0, 6)
    blocks.fork(0, 1)
    blocks.check_integrity()
    blocks.append(1, 6, 7)
    blocks.check_integrity()
    assert blocks.block_tables(0)[0][0] == blocks.block_tables(1)[0][0]
    assert blocks.block_tables(0)[0][1] != blocks.block_tables(1)[0][1]
    assert [copy.num_slots for copy in blocks.copies(1)] == [2]
    for seq_id in (0, 1):
        blocks.free(seq_id)
    blocks.check_integrity()
    assert blocks.num_used_blocks == 0


def check_eviction() -> None:
    """Oldest step first, in it the deepest."""
    evictor = LRUEvictor()
    for block_id, age, depth in [(0, 1, 0), (1, 1, 2), (2, 1, 1), (3, 2, 9)]:
        evictor.add(block_id, age, depth)
    assert [evictor.evict() for _ in range(4)] == [1, 2, 0, 3]


def check_everything() -> None:
    check_forks()
    check_eviction()
    for seed in range(40):
        check_workload(seed)


def test_without_a_planted_bug_everything_passes():
    check_everything()


def wrap(owner, name, change):
    """Plant `change(original, self, *args)` in place of a method."""

    def plant(monkeypatch):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))

    return plant


def keep_last_block(original, self, seq_id):
    blocks = self._sequences[seq_id]
    if blocks.tables[-1].num_blocks > 1:
        blocks.tables[-1].num_blocks -= 1
    original(self, seq_id)


def free_twice(original, self, seq_id):
    first = self._sequences[seq_id].tables[0].ids()[:1]
    original(self, seq_id)
    for block_id in first:
        self.pool.free(block_id)


def forget_swapped_tier(original, self, seq_id):
    self._sequences[seq_id].on_host = False
    original(self, seq_id)


def release_sources_at_once(original, self, seq_id, token_ids):
    cached = original(self, seq_id, token_ids)
    for copy in self._sequences[seq_id].copies:
        self.pool.free(copy.src_block)
    return cached


def drop_content_late(original, self):
    block_id = self._free.popleft() if self._free else self.evictor.evict()
    self.ref_counts[block_id] = 1
    return block_id


def preempt_the_oldest(original, self, group, seq, num_tokens, plan):
    self.running.reverse()
    try:
        return original(self, group, seq, num_tokens, plan)
    finally:
        self.running.reverse()


def evict_newest(original, self):
    block_id = next(reversed(self._places))
    self.remove(block_id)
    return block_id


def miss_the_last_token(original, self, group, seq, token_id):
    original(self, group, seq, token_id)
    if seq.num_output_tokens == 2 and not seq.status.is_finished:
        seq.token_ids.pop()


def first_copies_only(original, self, seq_id):
    return tuple(replace(copy, num_slots=copy.num_slots - 1) for copy in original(self, seq_id))


def plant_unlimited_budget(monkeypatch):
    original = Scheduler._schedule_running

    def schedule_running(self, plan):
        plan.token_budget = 10_000
        original(self, plan)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)


BUGS = {
    "a block is not given back": wrap(BlockSpaceManager, "free", keep_last_block),
    "a block is given back twice": wrap(BlockSpaceManager, "free", free_twice),
    "a swapped-out sequence frees device blocks": wrap(BlockSpaceManager, "free", forget_swapped_tier),
    "a prefix hit takes no hold": wrap(PrefixCachingBlockAllocator, "acquire", lambda original, self, block_id: None),
    "the source of a copy is let go too early": wrap(BlockSpaceManager, "allocate", release_sources_at_once),
    "a copy is lost": wrap(BlockSpaceManager, "copies", lambda original, self, seq_id: ()),
    "a copy is one token short": wrap(BlockSpaceManager, "copies", first_copies_only),
    "copies are never done with": wrap(BlockSpaceManager, "_release_copies", lambda original, self, blocks: None),
    "one token too many counts as cached": wrap(
        BlockSpaceManager, "allocate", lambda original, self, *args: original(self, *args) + 1
    ),
    "a fork does not count its holds": wrap(BlockAllocator, "share", lambda original, self, block_id: None),
    "a shared block is written": wrap(BlockSpaceManager, "_shared_write_groups", lambda original, self, *args: []),
    "blocks are published before they are computed": wrap(
        BlockSpaceManager,
        "publish",
        lambda original, self, seq_id, tokens, computed: original(self, seq_id, tokens, len(tokens)),
    ),
    "a tail is published before it is computed": wrap(
        BlockSpaceManager,
        "publish_tail",
        lambda original, self, seq_id, tokens, computed: original(self, seq_id, [*tokens, 0], len(tokens) + 1),
    ),
    "an evicted block keeps its content": wrap(PrefixCachingBlockAllocator, "allocate", drop_content_late),
    "the newest is evicted": wrap(LRUEvictor, "evict", evict_newest),
    "a held block stays evictable": wrap(LRUEvictor, "remove", lambda original, self, block_id: None),
    "a hash forgets its parent": wrap(
        ContentHasher, "child", lambda original, self, parent, tokens: original(self, b"", tokens)
    ),
    "a chain is one block behind": wrap(
        HashChain, "parent", lambda original, self, index: original(self, max(0, index - 1))
    ),
    "content is found by hash, tokens unseen, and hashes collide": lambda monkeypatch: (
        monkeypatch.setattr(ContentHasher, "child", lambda self, parent, tokens: b"same"),
        monkeypatch.setattr(BlockTracker, "find", lambda self, block_hash, tokens: self._by_hash.get(block_hash)),
    ),
    "a discarded block stays in the prefix tree": wrap(
        BlockTracker, "discard", lambda original, self, block_id: self._contents.pop(block_id, None)
    ),
    "a free block is handed out twice": wrap(
        NaiveBlockAllocator,
        "allocate",
        lambda original, self: (self._free.append(self._free[0]), original(self))[1],
    ),
    "a table exchanges the wrong block": wrap(
        BlockTable, "replace", lambda original, self, index, block_id: original(self, max(0, index - 1), block_id)
    ),
    "blocks swapped out are not copied": wrap(
        BlockSpaceManager, "swap_out", lambda original, self, seq_ids: (original(self, seq_ids), ())[1]
    ),
    "blocks swapped in are copied the wrong way round": wrap(
        BlockSpaceManager, "swap_in", lambda original, self, ids: tuple((d, h) for h, d in original(self, ids))[::-1]
    ),
    "a failed swap is not reverted": wrap(Scheduler, "revert", lambda original, self: None),
    "the oldest request is preempted": wrap(Scheduler, "_make_room", preempt_the_oldest),
    "the token budget is ignored": plant_unlimited_budget,
    "a token is lost in commit": wrap(Committer, "_append", miss_the_last_token),
    "waiting requests are forgotten when one is preempted": wrap(
        Scheduler, "_requeue", lambda original, self, group: (original(self, group), setattr(self, "waiting", deque()))
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, monkeypatch):
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        check_everything()
