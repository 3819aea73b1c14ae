"""The live view of the engine's cache and queues, as snapshots and differences. This module does not import torch.

A view exists only while there are watchers; otherwise no changes are recorded. A frame is made at most every 100 ms,
and less often if making one takes more than COST_SHARE of the time. Reference counts and block tables are compared as
whole arrays; the contents of blocks are read only where the prefix cache has recorded a change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.requests.sequence import SequenceGroup
from quire.engine.view import cache_frame

if TYPE_CHECKING:
    from quire.engine.requests.grammar_queue import GrammarQueue
    from quire.engine.scheduling.scheduler import Scheduler
    from quire.engine.step.commit import Committer
    from quire.kv.block_pool import BlockPool
    from quire.kv.block_space_manager import BlockSpaceManager

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 1.0
COST_SHARE = 0.008
"""Share of the time between two frames that making one may take, if they are at most MAX_INTERVAL_S apart."""
MAX_BLOCKS = 3072
"""Largest number of blocks in one frame; the others follow in the next frames."""
MAX_QUEUED = 256
"""Largest number of waiting requests, and of swapped-out requests, in one frame."""
MAX_EVENTS = 256
MAX_LISTED_BLOCKS = 32
_HASH_BYTES = 6  # JavaScript represents integers of this size exactly
_PIN_KEY = 0x1E3779B97F4A7C15

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")
_PREFILL, _DECODE = "prefill", "decode"


class Watched(Protocol):
    """The parts of an engine that a view reads."""

    scheduler: Scheduler
    blocks: BlockSpaceManager
    committer: Committer
    grammars: GrammarQueue


class CacheView:
    """Makes frames of what has changed. An engine has one view at a time, which only the engine's thread may call."""

    def __init__(self, engine: Watched, clock: Callable[[], float] = time.monotonic) -> None:
        """Record changes from now on; the first frame is a snapshot. `clock` measures the time that a frame takes."""
        self._scheduler, self._blocks = engine.scheduler, engine.blocks
        self._committer, self._grammars = engine.committer, engine.grammars
        self._clock = clock
        self._due_s = -1e9
        self._number = 0
        self._rows: dict[int, cache_frame.RequestRow] = {}
        self._counters: dict[str, int] = {}
        self._tiers = [_Tier(pool) for pool in self._blocks.tiers.pools]
        self._scheduler.requests.journal, self._blocks.tiers.journal = [], []

    def restart(self) -> None:
        """Make the next frame a snapshot again, for a further watcher. The time between frames stays the same, so that
        many short watches cost no more than one long one."""
        self._number, self._rows, self._counters = 0, {}, {}
        for tier in self._tiers:
            tier.restart()

    def close(self) -> None:
        """Stop the recording of changes in the engine."""
        self._scheduler.requests.journal = self._blocks.tiers.journal = None
        for tier in self._tiers:
            tier.close()

    def frame(self, now: float) -> bytes | None:
        """Return the changes as JSON of a CacheUpdate; None if there are none, or if it is too early for a frame.

        Call this after each step, and every MIN_INTERVAL_S while the engine is idle, with the engine's time.
        """
        if now < self._due_s:
            return None
        start_s = self._clock()
        frame = self._frame(now)
        data = None if frame is None else msgspec.json.encode(frame)
        cost_s = self._clock() - start_s
        self._due_s = now + min(max(MIN_INTERVAL_S, cost_s / COST_SHARE), MAX_INTERVAL_S)
        return data

    def _frame(self, now: float) -> cache_frame.CacheUpdate | None:
        tables = _BlockTables(self._scheduler, self._blocks)
        pinned = [block_id for block_ids in self._blocks.pins.block_ids.values() for block_id in block_ids]
        device, host = [
            tier.changes(tables.entries(number), pins) if tier.num_blocks else None
            for number, (tier, pins) in enumerate(zip(self._tiers, (pinned, []), strict=True))
        ]
        rows = self._request_rows(tables.num_blocks)
        changed = [row for order, row in rows.items() if self._rows.get(order) != row]
        gone = [order for order in self._rows if order not in rows]
        counters = self._read_counters()
        events, num_unlisted = self._take_events()
        news = {name: value for name, value in counters.items() if self._counters.get(name) != value}
        if self._number and not (device or host or changed or gone or news or events):
            return None
        self._rows, self._counters = rows, counters
        setup = self._setup() if self._number == 0 else None
        frame = cache_frame.CacheUpdate(
            self._number, now, setup, device, host, changed, gone, news, events, num_unlisted
        )
        self._number += 1
        return frame

    def _setup(self) -> cache_frame.CacheSetup:
        config = self._blocks.config
        max_num_seqs = self._scheduler.config.max_num_seqs
        return cache_frame.CacheSetup(
            config.block_size, config.num_blocks, config.num_host_blocks, len(config.groups), max_num_seqs
        )

    def _request_rows(self, num_blocks: dict[int, int]) -> dict[int, cache_frame.RequestRow]:
        requests = self._scheduler.requests
        swapped = sorted(requests.swapped, key=lambda group: group.order)[:MAX_QUEUED]
        waiting = [group for group in requests.policy.queued(MAX_QUEUED) if group not in requests.swapped]
        queues = {
            "running": (None, requests.running),
            "swapped": (None, swapped),
            "waiting": (None, waiting),
            "grammar": ("waiting", self._grammars.queued(MAX_QUEUED)),
        }
        return {
            group.order: _row(group, queue or name, queue and name, num_blocks.get(group.order, 0))
            for name, (queue, groups) in queues.items()
            for group in groups
        }

    def _read_counters(self) -> dict[str, int]:
        scheduler, blocks, drafting = self._scheduler, self._blocks, self._committer.drafting
        by_drafter = {} if drafting is None else drafting.stats
        drafts = by_drafter.values()
        return {
            "running": len(scheduler.requests.running),
            "waiting": scheduler.requests.num_waiting + len(self._grammars),
            "swapped": len(scheduler.requests.swapped),
            "used_blocks": blocks.num_used_blocks,
            "cached_blocks": blocks.pool.num_cached_blocks,
            "pinned_blocks": blocks.pins.num_blocks,
            "steps": scheduler.num_steps,
            "prompt_tokens": self._committer.num_prompt_tokens,
            "generated_tokens": self._committer.num_generated_tokens,
            "drafts": sum([counts.num_tokens for counts in drafts]),
            "accepted_drafts": sum([counts.num_accepted for counts in drafts]),
            **{f"drafts_{name}": counts.num_tokens for name, counts in by_drafter.items()},
            **{f"accepted_drafts_{name}": counts.num_accepted for name, counts in by_drafter.items()},
            "preemptions": scheduler.preemptor.num_preemptions,
            "preemptions_by_swap": scheduler.preemptor.num_preemptions_by_swap,
            "swapped_blocks": scheduler.num_swapped_blocks,
            **{f"prefix_{name}": count for name, count in blocks.stats.to_dict().items()},
        }

    def _take_events(self) -> tuple[list[cache_frame.CacheEvent], int]:
        """Return the journals' events in the order in which they first happened, equal ones counted together, and the
        number of events left out."""
        events: dict[tuple[str, str], cache_frame.CacheEvent] = {}
        for kind, group in _taken(self._scheduler.requests.journal):
            event = events.setdefault((kind, group.request_id), cache_frame.CacheEvent(kind, 0, group.request_id))
            event.count += 1
            if kind == "finished":
                _add_times(event, group)
        for kind, block_id in _taken(self._blocks.tiers.journal):
            event = events.setdefault((kind, ""), cache_frame.CacheEvent(kind, 0, block_ids=[]))
            event.count += 1
            if len(event.block_ids) < MAX_LISTED_BLOCKS:
                event.block_ids.append(block_id)
        return list(events.values())[-MAX_EVENTS:], max(0, len(events) - MAX_EVENTS)


def _taken(journal: list[T] | None) -> list[T]:
    taken = list(journal or ())
    if journal is not None:
        journal.clear()
    return taken


def _row(group: SequenceGroup, queue: str, stage: str | None, num_blocks: int) -> cache_frame.RequestRow:
    seqs, first = group.seqs, group.seqs[0]
    furthest, num_seqs = first, max(len(seqs), len(first.draws))
    num_generated = len(first.token_ids) - first.num_prompt_tokens
    if len(seqs) > 1:
        furthest = max(seqs, key=lambda seq: seq.num_computed_tokens)
        num_generated = sum([seq.num_output_tokens for seq in seqs])
    params = group.params
    return cache_frame.RequestRow(
        group.order,
        group.request_id,
        queue,
        stage or (_DECODE if len(furthest.token_ids) - furthest.num_computed_tokens == 1 else _PREFILL),
        group.tenant,
        params.priority,
        num_seqs,
        first.num_prompt_tokens,
        group.num_cached_tokens,
        furthest.num_computed_tokens,
        num_generated,
        (params.max_tokens or 0) * num_seqs,
        num_blocks,
        group.metrics.num_preemptions,
        "" if group.adapter is None else group.adapter.name,
        *group.metrics.num_drafts,
    )


def _add_times(event: cache_frame.CacheEvent, group: SequenceGroup) -> None:
    """Add the reason and the times of a finished request to its event."""
    event.reason = group.seqs[0].status.value
    metrics = group.metrics
    arrival_s, first_s, end_s = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
    if metrics.first_scheduled_time is not None:
        event.queue_s = metrics.first_scheduled_time - arrival_s
    if end_s is not None:
        event.e2e_s = end_s - arrival_s
    if first_s is not None:
        event.ttft_s = first_s - arrival_s
        num_more = max(seq.num_output_tokens for seq in group.seqs) - 1
        if end_s is not None and num_more > 0:
            event.inter_token_s = (end_s - first_s) / num_more


_Table: TypeAlias = tuple[npt.NDArray[np.int32], int, int, int, int]
"""The block ids of a table, the index of the first one, the number of tokens computed, and the order and the key of the
request."""


class _Entries:
    """The entries of many block tables, one after another."""

    def __init__(self, tables: list[_Table], block_size: int) -> None:
        arrays = [table[0] for table in tables]
        facts = np.array([(len(ids), *others) for ids, *others in tables], np.int64).reshape(-1, 5)
        lengths, first, computed, orders, keys = facts.T
        self.ids = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        starts = np.cumsum(lengths) - lengths
        self.index = np.arange(len(self.ids)) - (starts - first).repeat(lengths)
        """Index of each entry in its block table."""
        self.filled = np.minimum(np.maximum(computed.repeat(lengths) - self.index * block_size, 0), block_size)
        """Number of tokens computed in each entry's block."""
        self.keys = keys.repeat(lengths)
        """A random-looking number for each entry's request; different sets of requests have different sums of keys."""
        self.orders = orders.repeat(lengths)


class _BlockTables:
    """The block tables of all sequences at this moment."""

    def __init__(self, scheduler: Scheduler, blocks: BlockSpaceManager) -> None:
        self.num_blocks: dict[int, int] = {}
        """Number of table entries of each request, by its order."""
        self._block_size = blocks.block_size
        self._tables: list[list[_Table]] = [[] for _ in blocks.tiers.pools]  # by tier
        for seq_id, tier, tables in blocks.holdings():
            owner = scheduler.requests.owners.get(seq_id)
            assert owner is not None, f"sequence {seq_id} has blocks and is not known"
            order, num_computed, count = owner[0].order, owner[1].num_computed_tokens, 0
            key = hash((order,))
            for table in tables:
                ids = table.snapshot()
                if table.first:
                    ids = ids[table.first :]
                count += len(ids)
                self._tables[tier].append((ids, table.first, num_computed, order, key))
            self.num_blocks[order] = self.num_blocks.get(order, 0) + count

    def entries(self, tier: int) -> _Entries:
        """Return all table entries of one tier."""
        return _Entries(self._tables[tier], self._block_size)


class _Tier:
    """The blocks of one pool in the state that the frames so far have described."""

    def __init__(self, pool: BlockPool) -> None:
        self.num_blocks = size = pool.num_blocks
        self._pool, self._tracker = pool, pool.tracker
        self._refs, self._filled, self._owners = np.zeros((3, size), np.int64)
        self._tokens, self._depths, self._hits, self._hashes, self._parents = np.zeros((5, size), np.int64)
        self._pending = np.zeros(size, np.bool_)
        """Whether each block has changed since it was last in a frame."""
        self._tracker.touched = set(self._tracker.block_ids())

    def restart(self) -> None:
        """Mark all blocks that are not free as changed."""
        self._pending |= (self._refs > 0) | (self._tokens > 0)

    def close(self) -> None:
        """Stop the recording of changes."""
        self._tracker.touched = None

    def changes(self, entries: _Entries, pinned: list[int]) -> cache_frame.BlockColumns | None:
        """Return the blocks that have changed, at most MAX_BLOCKS of them; None if there are none."""
        self._read_contents()
        refs = np.array(self._pool.ref_counts, np.int64)
        filled, owners = np.zeros_like(self._filled), np.zeros_like(self._owners)
        np.maximum.at(filled, entries.ids, entries.filled)
        np.add.at(owners, entries.ids, entries.keys)
        np.add.at(owners, pinned, _PIN_KEY)
        depths = self._depths.copy()
        depths[entries.ids] = entries.index
        self._pending |= (refs != self._refs) | (filled != self._filled) | (owners != self._owners)
        self._pending |= depths != self._depths  # a request that starts again may get its blocks in another order
        self._refs, self._filled, self._owners, self._depths = refs, filled, owners, depths
        ids = np.flatnonzero(self._pending)[:MAX_BLOCKS]
        self._pending[ids] = False
        return self._columns(ids, entries, pinned) if len(ids) else None

    def _read_contents(self) -> None:
        """Read the contents that have changed, of at most MAX_BLOCKS blocks."""
        touched = self._tracker.touched
        if not touched:
            return
        num_read = min(MAX_BLOCKS, len(touched))
        ids = [touched.pop() for _ in repeat(None, num_read)]
        rows = []
        for block_id in ids:
            content = self._tracker.get(block_id)
            if content is None:
                rows.append((0, 0, 0, 0, 0))
            else:
                name = 0 if content.block_hash is None else _short(content.block_hash, content.group)
                parent = _short(content.parent, content.group)
                rows.append((content.num_tokens, content.depth, content.num_hits, name, parent))
        columns = np.array(rows, np.int64).T
        self._tokens[ids], self._depths[ids], self._hits[ids], self._hashes[ids], self._parents[ids] = columns
        self._pending[ids] = True

    def _columns(self, ids: IntArray, entries: _Entries, pinned: list[int]) -> cache_frame.BlockColumns:
        refs, tokens = self._refs[ids], self._tokens[ids]
        states = np.where(refs > 0, cache_frame.OWNED, np.where(tokens > 0, cache_frame.CACHED, cache_frame.FREE))
        if pinned:
            states[np.isin(ids, pinned)] = cache_frame.PINNED
        is_known = states != cache_frame.FREE
        return cache_frame.BlockColumns(
            ids.tolist(),
            states.tolist(),
            refs.tolist(),
            np.maximum(self._filled[ids], tokens).tolist(),
            (self._depths[ids] * is_known).tolist(),
            self._hits[ids].tolist(),
            self._hashes[ids].tolist(),
            self._parents[ids].tolist(),
            self._owners_of(ids, entries),
        )

    def _owners_of(self, ids: IntArray, entries: _Entries) -> list[list[int]]:
        """Return the requests that use each of these blocks."""
        is_listed = np.zeros(self.num_blocks, np.bool_)
        is_listed[ids] = True
        places = np.flatnonzero(is_listed[entries.ids])
        owners: dict[int, set[int]] = {}
        for block_id, order in zip(entries.ids[places].tolist(), entries.orders[places].tolist(), strict=True):
            owners.setdefault(block_id, set()).add(order)
        return [sorted(owners[block_id]) if block_id in owners else [] for block_id in ids.tolist()]


def _short(block_hash: bytes, group: int) -> int:
    """Return the first bytes of a hash as a number; equal contents of two KV cache groups have different numbers."""
    return int.from_bytes(block_hash[:_HASH_BYTES], "little") ^ group
