"""Bugs planted in scheduling and block accounting: the checks that every other test relies on must see each of them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec.structs
import pytest

from quire.engine.requests.sequence import Sequence, SequenceStatus
from quire.engine.scheduling.policy import FairShare, FirstComeFirstServed
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.unfinished import UnfinishedRequests
from quire.engine.step.commit import Committer
from quire.kv.block_pool import BlockPool
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.block_table import BlockTable
from quire.kv.managers.attention import SlidingWindowManager
from quire.kv.place import Place
from quire.kv.prefix_cache.content_hash import ContentHasher, ContentKey, HashChain, token_bytes
from quire.kv.prefix_cache.evictor import LRUEvictor
from quire.kv.prefix_cache.lookup import PrefixLookup
from quire.kv.prefix_cache.pins import Pins
from quire.kv.prefix_cache.sharing import PrefixSharing
from quire.kv.prefix_cache.tracker import BlockTracker
from quire.kv.slot_copies import SlotCopies
from quire.kv.tiers import Tiers

from .checks import check_everything
from .fake import FakeExecutor


@pytest.mark.essential
def test_without_a_planted_bug_everything_passes():
    check_everything()


Plant = Callable[[pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Bug:
    plant: Plant
    seen_by: str
    """part of the statement that fails, or of its message"""


def wrap(owner: type, name: str, change: Callable) -> Plant:
    """Plant `change(original, self, *args)` in place of a method."""

    def plant(monkeypatch):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))

    return plant


def skip(owner: type, name: str, result: object = None) -> Plant:
    """The method does nothing."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, lambda self, *args: result)


def keep_last_block(original, self, seq_id):
    table = self._sequences[seq_id].tables[-1]
    if len(table.ids()) > 1:
        table._ids.pop()
    original(self, seq_id)


def free_twice(original, self, seq_id):
    first = self._sequences[seq_id].tables[0].ids()[:1]
    original(self, seq_id)
    for block_id in first:
        self.pool.free(block_id)


def forget_swapped_tier(original, self, seq_id):
    self._sequences[seq_id].tier = 0
    original(self, seq_id)


def release_sources_at_once(original, self, hit):
    cached = original(self, hit)
    for copy in self._copies._waiting.get(hit.seq_id, ()):
        self.pool.free(copy.src_block)
    return cached


def count_one_more(original, self, hit):
    num_cached = original(self, hit)
    return num_cached + (num_cached % self.block_size > 0 and num_cached + 1 < len(hit.token_ids))


def publish_what_is_not_full(original, self, seq_id, token_ids, num_computed):
    end = min(len(token_ids) // self.block_size * self.block_size, num_computed + self.block_size - 1)
    original(self, seq_id, token_ids, max(num_computed, end))


def publish_one_more(original, self, seq_id, token_ids, num_computed):
    more = 0 < num_computed % self.block_size < self.block_size - 1
    original(self, seq_id, [*token_ids, 0], num_computed + more)


def drop_content_late(original, self):
    block_id = self._free.pop() if self._free else self.evictor.evict()
    self.ref_counts[block_id] = 1
    return block_id


def evict_newest(original, self):
    block_id = next(reversed(self._places))
    self.remove(block_id)
    return block_id


def evict_shallowest(original, self, block_id, age, depth):
    original(self, block_id, age, -depth)


def miss_the_last_token(original, self, group, seq, *drawn):
    original(self, group, seq, *drawn)
    if seq.num_output_tokens == 2 and not seq.status.is_finished:
        seq.token_ids.pop()


def copy_one_token_less(original, self, seq_ids, step):
    return tuple(replace(copy, num_slots=copy.num_slots - 1) for copy in original(self, seq_ids, step))


def plan_10000_tokens(original, self, plan):
    plan.token_budget = plan.prefill_budget = 10_000
    original(self, plan)


def keep_duplicates(original, self, table, content):
    tracker, block_id = self.cache.tracker, table[content.depth]
    if content.block_hash is None or tracker.find(content.group, content.block_hash, content.tokens) is None:
        original(self, table, content)
    return block_id


def free_the_wrong_duplicate(original, self, table, content):
    tracker, block_id = self.cache.tracker, table[content.depth]
    other = tracker.find(content.group, content.block_hash, content.tokens) if content.block_hash else None
    original(self, table, content)
    if other is not None and other.block_id != block_id:
        self.cache.free(other.block_id)
        self.cache.ref_counts[block_id] += 1


def join_what_is_not_scheduled(original, self, owner, group, index):
    table = self._sequences[owner].tables[group]
    return table[index] if table.first <= index < table.num_blocks else None


def join_without_a_hold(original, self, block_id):
    if block_id in self.tracker:
        original(self, block_id)


def wait_for_ever(original, self, seq_id, chain, token_ids, max_blocks):
    hit = original(self, seq_id, chain, token_ids, max_blocks)
    return msgspec.structs.replace(hit, is_awaited=hit.num_blocks < max_blocks)


def keep_unsettled(original, self, step=None):
    for batch in self._in_flight.values():
        batch.unsettled = []
    original(self, step)


def keep_swapped_out(original, self, step=None):
    for batch in self._in_flight.values():
        batch.unsettled = [pair for pair in batch.unsettled if pair[1].status is not SequenceStatus.SWAPPED]
    original(self, step)


def keep_spilled(original, self, step):
    for transfers in (*self._in_flight.values(), self._planned):
        transfers.spilled.clear()
    original(self, step)


def release_at_once(original, self, source, target):
    original(self, source, target)
    if target.tier == 0:
        self._planned.held.remove(source)
        self.pools[1].free(source.block_id)


def copy_nothing_in(original, self, source, target):
    original(self, source, target)
    if target.tier == 0:
        self._planned.pairs[1, 0].pop()


def copy_in_before_out(original, self, batch):
    original(self, msgspec.structs.replace(batch, transfers=batch.transfers[::-1]))


def copy_nothing_out(original, self, step):
    return tuple(transfer for transfer in original(self, step) if transfer.target_tier == 0)


def free_one_token_too_early(original, self, num_tokens):
    return original(self, num_tokens + 1)


def need_one_block_less(original, self, num_blocks):
    return tuple(
        min(first + (not manager.is_prefix_closed), num_blocks)
        for first, manager in zip(original(self, num_blocks), self._managers, strict=True)
    )


def pin_without_a_hold(original, self, token_ids, *key):
    pin = original(self, token_ids, *key)
    for block_id in self.block_ids[pin.pin_id]:
        self._prefixes.cache.free(block_id)
    return pin


def unpin_again_and_again(original, self, pin_id):
    block_ids = self.block_ids[pin_id]
    original(self, pin_id)
    self.block_ids[pin_id] = block_ids


def write_into_what_a_fork_shares(original, self, parent_id, child_id):
    num_writable = self._sequences[parent_id].num_writable
    original(self, parent_id, child_id)
    self._sequences[parent_id].num_writable = self._sequences[child_id].num_writable = num_writable


def count_sources_as_sharers(original, self, *args):
    sources, self._copies.sources = self._copies.sources, Counter()
    try:
        return original(self, *args)
    finally:
        self._copies.sources = sources


def fork_without_holds(original, self, parent_id, child_id):
    original(self, parent_id, child_id)
    for table in self._sequences[child_id].tables:
        for block_id in table.ids():
            self.pool.ref_counts[block_id] -= 1


def draw_like_the_parent(original, self, seq_id, draw):
    return original(self, seq_id, self.draws[0])


def count_again(original, self, hit, chain, num_tail_tokens):
    chain.looked_up = False
    original(self, hit, chain, num_tail_tokens)


def promise_room_later(original, self, hit):
    return AllocStatus.LATER if original(self, hit) is AllocStatus.NEVER else original(self, hit)


def settle_without_giving_back(original, self, step):
    self._in_flight.pop(step)


def ignore_collisions(monkeypatch):
    monkeypatch.setattr(ContentHasher, "child", lambda self, parent, tokens: b"same")
    monkeypatch.setattr(
        BlockTracker, "find", lambda self, g, key, _: {k: Place(0, b) for k, b in self._by_hash[g].items()}.get(key)
    )


COUNTS = "differ from the holders'"
OUTPUT = "output(group, sample) == expected"
TWICE = "freed more often than it was taken"
COPIES = "copies of the last block"
ORDER = "order of eviction"
FOUND = "found under"
LIVELOCK = "livelock"

BLOCKS, CACHE = BlockSpaceManager, BlockPool
BUGS = {
    "a block is not given back": Bug(wrap(BLOCKS, "free", keep_last_block), COUNTS),
    "a block is given back twice": Bug(wrap(BLOCKS, "free", free_twice), TWICE),
    "a swapped-out sequence frees device blocks": Bug(wrap(BLOCKS, "free", forget_swapped_tier), COUNTS),
    "a prefix hit takes no hold": Bug(skip(CACHE, "acquire"), COUNTS),
    "the source of a copy is let go too early": Bug(wrap(BLOCKS, "allocate", release_sources_at_once), TWICE),
    "a copy is lost": Bug(skip(BLOCKS, "take_copies", ()), COPIES),
    "a copy is one token short": Bug(wrap(BLOCKS, "take_copies", copy_one_token_less), OUTPUT),
    "copies are never done with": Bug(skip(SlotCopies, "_release"), "num_used_blocks == 0"),
    "a source of a copy counts as a sharer": Bug(
        wrap(BLOCKS, "_shared_write_groups", count_sources_as_sharers), COPIES
    ),
    "one token too many counts as cached": Bug(wrap(BLOCKS, "allocate", count_one_more), OUTPUT),
    "a fork does not count its holds": Bug(wrap(BLOCKS, "fork", fork_without_holds), COUNTS),
    "a shared block is written": Bug(skip(BLOCKS, "_shared_write_groups", []), COPIES),
    "a fork and its parent write on into the shared block": Bug(
        wrap(BLOCKS, "fork", write_into_what_a_fork_shares), COPIES
    ),
    "a fork draws like its parent": Bug(wrap(Sequence, "fork", draw_like_the_parent), OUTPUT),
    "blocks are published before they are full": Bug(wrap(BLOCKS, "publish", publish_what_is_not_full), OUTPUT),
    "a tail is published before it is computed": Bug(wrap(BLOCKS, "publish_tail", publish_one_more), OUTPUT),
    "duplicates are not given back": Bug(wrap(PrefixSharing, "_publish", keep_duplicates), "duplicates are kept"),
    "of two duplicates the wrong one is given back": Bug(
        wrap(PrefixSharing, "_publish", free_the_wrong_duplicate), "both free and owned"
    ),
    "a block is joined that is not scheduled": Bug(
        wrap(BLOCKS, "_join", join_what_is_not_scheduled), "joined that nobody computes"
    ),
    "a block is joined without a hold": Bug(wrap(CACHE, "acquire", join_without_a_hold), COUNTS),
    "requests wait for blocks that nobody computes": Bug(wrap(PrefixLookup, "find", wait_for_ever), LIVELOCK),
    "who ends is still said to compute its blocks": Bug(
        skip(PrefixSharing, "withdraw"), "said to compute a block that it does not"
    ),
    "an evicted block keeps its content": Bug(
        wrap(CACHE, "allocate", drop_content_late), "content of a failed step is found"
    ),
    "the newest is evicted": Bug(wrap(LRUEvictor, "evict", evict_newest), ORDER),
    "the beginning of a prefix is evicted before its end": Bug(wrap(LRUEvictor, "add", evict_shallowest), ORDER),
    "a held block stays evictable": Bug(skip(LRUEvictor, "remove"), "both evictable and owned"),
    "use does not make young": Bug(skip(Tiers, "advance"), "what was used last is evicted"),
    "a hash forgets its parent": Bug(
        wrap(ContentHasher, "child", lambda original, self, parent, tokens: original(self, b"", tokens)), FOUND
    ),
    "a chain is one block behind": Bug(
        wrap(HashChain, "parent", lambda original, self, index: original(self, max(0, index - 1))),
        "hash is not that of its tokens",
    ),
    "content is found by hash, tokens unseen, and hashes collide": Bug(ignore_collisions, FOUND),
    "the salt is left out": Bug(
        wrap(ContentKey, "root", lambda original, self: original(replace(self, cache_salt=""))), FOUND
    ),
    "media are left out": Bug(
        wrap(HashChain, "content", lambda original, self, start, stop, tokens: token_bytes(tokens[start:stop])), FOUND
    ),
    "a discarded block stays in the prefix tree": Bug(
        wrap(BlockTracker, "pop", lambda original, self, block_id: self._contents.pop(block_id)),
        "the prefix tree is wrong",
    ),
    "a free block is handed out twice": Bug(
        wrap(
            BlockPool,
            "allocate",
            lambda original, self: (self._free.append(self._free[0]), original(self))[1],
        ),
        "both free and owned",
    ),
    "a table exchanges the wrong block": Bug(
        wrap(BlockTable, "replace", lambda original, self, index, block: original(self, max(0, index - 1), block)),
        COUNTS,
    ),
    "blocks slide out one token too early": Bug(
        wrap(SlidingWindowManager, "first_needed", free_one_token_too_early), OUTPUT
    ),
    "blocks never slide out": Bug(skip(BlockTable, "slide", ()), "behind the window are held"),
    "a hit is one block short of the window": Bug(
        wrap(PrefixLookup, "first_needed", need_one_block_less), "states == seen"
    ),
    "blocks swapped out are not copied": Bug(wrap(BLOCKS, "take_transfers", copy_nothing_out), OUTPUT),
    "blocks swapped in are not copied": Bug(wrap(Tiers, "_copy", copy_nothing_in), OUTPUT),
    "blocks are copied in before what they hold is copied out": Bug(
        wrap(FakeExecutor, "_move_blocks", copy_in_before_out), OUTPUT
    ),
    "a host block is given to others while the step reads it": Bug(wrap(Tiers, "_copy", release_at_once), OUTPUT),
    "host blocks are never given back": Bug(wrap(Tiers, "settle", settle_without_giving_back), COUNTS),
    "who was not swapped out since the step failed is swapped in": Bug(
        wrap(UnfinishedRequests, "revert", keep_swapped_out), OUTPUT
    ),
    "who relies on a failed step goes on": Bug(wrap(UnfinishedRequests, "revert", keep_unsettled), OUTPUT),
    "spilled content is found after a failed step": Bug(
        wrap(Tiers, "revert", keep_spilled), "content of a failed step is found"
    ),
    "a pin takes no hold": Bug(wrap(Pins, "pin", pin_without_a_hold), COUNTS),
    "a prefix is unpinned twice": Bug(wrap(Pins, "unpin", unpin_again_and_again), COUNTS),
    "the oldest request is preempted": Bug(
        wrap(FirstComeFirstServed, "rank", lambda original, self, group: -group.order), "the oldest was preempted"
    ),
    "the token budget is ignored": Bug(
        wrap(Scheduler, "_schedule_running", plan_10000_tokens), "max_num_batched_tokens"
    ),
    "a token is lost in commit": Bug(wrap(Committer, "_append", miss_the_last_token), LIVELOCK),
    "a tenant's tokens are not charged": Bug(skip(FairShare, "charge"), "out of turn"),
    "a request too long waits for ever": Bug(
        wrap(BLOCKS, "can_allocate", promise_room_later), "the end of a request is not reported"
    ),
    "preempted requests are counted again": Bug(
        wrap(PrefixSharing, "_count", count_again), "preempted requests are counted"
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name, monkeypatch):
    BUGS[name].plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)) as error:
        check_everything()
    reason = f"{error.traceback[-1].statement} {error.typename} {error.value}"
    assert BUGS[name].seen_by in reason, f"seen for another reason: {reason}"
