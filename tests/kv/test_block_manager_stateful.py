"""The block manager alone, under any order of calls: each slot that a sequence looks at holds that sequence's own past.

The machine does what scheduler, executor and commit do, and keeps what every slot of both tiers holds: a token's past,
which is all that its keys and values depend on. A step may fail after any of its operations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.common.errors import RequestError
from quire.config.kv_cache import KVCacheConfig, KVCacheGroup, attention_spec
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from quire.kv.prefix_cache.pins import PinnedPrefix
from tests.effort import examples

KEYS = [
    NO_KEY,
    ContentKey(cache_salt="salt"),
    ContentKey(lora_id="adapter"),
    ContentKey(media=((1, b"cat"),)),
    ContentKey(media=((1, b"dog"), (4, b"cat"))),
]
MAX_STREAMS = 6
PROBE = -2  # a sequence id of lookups that allocate nothing
NOBODY = 20

Past = tuple[object, ...]
prompts = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=14)
which = st.integers(0, MAX_STREAMS - 1)
chunks = st.integers(1, 14)
drawn_tokens = st.integers(0, 2**MAX_STREAMS - 1)  # one bit for each sequence


@dataclass
class Stream:
    """A sequence as its owner knows it."""

    seq_id: int
    token_ids: list[int]
    key: ContentKey
    state: str = "waiting"
    num_computed: int = 0
    end: int | None = None
    """tokens computed once the planned step has succeeded; None if it has no part in it"""
    is_unsettled: bool = False
    """its blocks are good only once the planned step has succeeded"""
    may_fork: bool = False
    """it ran in the last step, and its tables hold no blocks ahead of its tokens"""
    was_counted: bool = False
    num_slots: int = 0
    """tokens for which it has slots because of drafts; 0 without drafts"""

    def past(self, group: int, position: int) -> Past:
        """What the slot of a token holds: all that its keys and values depend on."""
        items = dict(self.key.media)
        shown: list[object] = [items.get(i, token_id) for i, token_id in enumerate(self.token_ids[: position + 1])]
        shown += ["draft"] * (position >= len(self.token_ids))
        return (group, self.key.lora_id, self.key.cache_salt, *shown)


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(2, 4),
        num_blocks=st.sampled_from([6, 7, 8, 10, 14, 20]),
        num_host_blocks=st.integers(0, 12),
        windows=st.sampled_from([(None,), (None, None), (5,), (None, 4), (3, None)]),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.2]),
        max_chunk=st.sampled_from([None, 4, 7]),
    )
    def set_up(self, block_size, num_blocks, num_host_blocks, windows, caching, watermark, max_chunk):
        groups = tuple(KVCacheGroup((i,), attention_spec(1, 2, "float32", w)) for i, w in enumerate(windows))
        self.config = KVCacheConfig(block_size, num_blocks, groups, num_host_blocks, max_chunk)
        self.manager = BlockSpaceManager(
            self.config, enable_prefix_caching=caching, watermark=watermark, pinned_fraction=0.4
        )
        self.max_tokens = min(20, self.config.max_tokens)
        self.windows, self.caching = windows, caching
        self.streams: list[Stream] = []
        self.pins: list[tuple[PinnedPrefix, list[int], ContentKey]] = []
        self.device: dict[tuple[int, int], Past] = {}
        self.host: dict[tuple[int, int], Past] = {}
        self.is_planning = False
        self.num_seqs = self.num_queried = 0

    # Planning a step

    def plan(self) -> None:
        if not self.is_planning:
            self.is_planning = True
            self.manager.advance()

    def idle(self, *states: str) -> list[Stream]:
        """The streams in these states that have no part in the planned step."""
        return [s for s in self.streams if s.state in states and s.end is None and not s.is_unsettled]

    def pick(self, index: int, *states: str) -> Stream:
        found = self.idle(*states)
        return found[index % len(found)]

    def schedule(self, stream: Stream, chunk: int) -> None:
        stream.may_fork = False
        stream.end = min(len(stream.token_ids), stream.num_computed + min(chunk, self.config.max_chunk or chunk))

    @precondition(lambda self: len(self.streams) < MAX_STREAMS)
    @rule(token_ids=prompts, key=st.sampled_from(KEYS), chunk=chunks, patient=st.booleans())
    def start(self, token_ids, key, chunk, patient):
        stream = Stream(self.num_seqs, token_ids[: self.max_tokens], key)
        self.num_seqs += 1
        self.streams.append(stream)
        self.begin(stream, chunk, patient)

    @precondition(lambda self: self.idle("waiting"))
    @rule(index=which, chunk=chunks, patient=st.booleans())
    def restart(self, index, chunk, patient):
        self.begin(self.pick(index, "waiting"), chunk, patient)

    def begin(self, stream: Stream, chunk: int, patient: bool) -> None:
        self.plan()
        hit = self.manager.look_up(stream.seq_id, stream.token_ids, stream.key)
        assert hit.num_blocks * self.config.block_size < len(stream.token_ids)
        status = self.manager.can_allocate(hit)
        if not self.pins and all(other.state != "running" for other in self.streams):
            assert status is AllocStatus.OK, "nobody is there to wait for"
        if status is AllocStatus.OK and not (patient and hit.is_awaited):
            stream.num_computed = self.manager.allocate(hit)
            assert hit.num_blocks * self.config.block_size <= stream.num_computed < len(stream.token_ids)
            stream.state, stream.is_unsettled = "running", hit.needs_step
            self.schedule(stream, chunk)
            self.manager.append(stream.seq_id, stream.num_computed, stream.end)
            self.num_queried += 0 if stream.was_counted else len(stream.token_ids) - 1
            stream.was_counted = True

    @precondition(lambda self: self.idle("running"))
    @rule(index=which, chunk=chunks)
    def advance(self, index, chunk):
        self.plan()
        self.grow(self.pick(index, "running"), chunk)

    def grow(self, stream: Stream, chunk: int) -> None:
        self.schedule(stream, chunk)
        if not self.manager.has_room(stream.seq_id, stream.end):
            if self.manager.can_append(stream.seq_id, stream.num_computed, stream.end):
                self.manager.append(stream.seq_id, stream.num_computed, stream.end)
            else:
                stream.end = None

    @precondition(lambda self: self.idle("running"))
    @rule(num_steps=st.integers(1, 4), chunk=chunks, drawn=drawn_tokens)
    def run(self, num_steps, chunk, drawn):
        """All that run go on, as far as there are blocks."""
        for _ in range(num_steps):
            self.plan()
            for stream in self.idle("running"):
                self.grow(stream, chunk)
            self.commit(drawn, NOBODY)

    @precondition(lambda self: self.is_planning)
    @rule(index=which, num_drafts=st.integers(1, 9))
    def draft(self, index, num_drafts):
        """Slots for tokens behind the newest one, which turn out wrong."""
        planned = [s for s in self.streams if s.state == "running" and s.end == len(s.token_ids)]
        stream = planned[index % len(planned)] if planned else None
        end = 0 if stream is None else max(stream.num_slots, min(stream.end + num_drafts, self.config.max_tokens))
        if stream is not None and self.manager.can_append(stream.seq_id, stream.num_computed, end):
            self.manager.append(stream.seq_id, stream.num_computed, end)
            stream.num_slots = end

    @precondition(lambda self: self.idle("running"))
    @rule(index=which)
    def preempt(self, index):
        self.plan()
        stream = self.pick(index, "running")
        self.manager.publish_tail(stream.seq_id, stream.token_ids, stream.num_computed)
        self.stop(stream)

    def stop(self, stream: Stream) -> None:
        self.manager.free(stream.seq_id)
        stream.state, stream.num_computed, stream.num_slots = "waiting", 0, 0

    @precondition(lambda self: self.idle("running"))
    @rule(first=which, second=which)
    def swap_out(self, first, second):
        streams = {s.seq_id: s for s in (self.pick(first, "running"), self.pick(second, "running"))}
        if self.manager.can_swap_out(list(streams)):
            self.plan()
            for stream in streams.values():
                self.manager.publish_tail(stream.seq_id, stream.token_ids, stream.num_computed)
                stream.state, stream.is_unsettled = "swapped", True
            self.manager.swap_out(list(streams))

    @precondition(lambda self: self.idle("swapped"))
    @rule(first=which, second=which)
    def swap_in(self, first, second):
        streams = {s.seq_id: s for s in (self.pick(first, "swapped"), self.pick(second, "swapped"))}
        self.plan()
        has_room = self.manager.can_swap_in(list(streams), max(len(s.token_ids) for s in streams.values()))
        if len(streams) == 1 and not self.pins and all(other.state != "running" for other in self.streams):
            assert has_room, "nobody is there to wait for"
        if has_room:
            self.manager.swap_in(list(streams))
            for stream in streams.values():
                stream.state, stream.is_unsettled = "running", True
                self.schedule(stream, len(stream.token_ids))
                self.manager.append(stream.seq_id, stream.num_computed, stream.end)

    # The step

    def operations(self) -> Iterator[Callable[[], None]]:
        """What the executor does, in its order."""
        tiers = self.device, self.host
        for source, target, pairs in self.manager.take_transfers(self.manager.step):
            yield from (partial(self.copy, tiers[source], a, tiers[target], b) for a, b in pairs)
        planned = [stream for stream in self.streams if stream.end is not None]
        for copy in self.manager.take_copies([stream.seq_id for stream in planned], self.manager.step):
            yield partial(self.copy, self.device, copy.src_block, self.device, copy.dst_block, copy.num_slots)
        ends = [(stream, max(stream.end, stream.num_slots)) for stream in planned]
        yield from (partial(self.write, s, position) for s, end in ends for position in range(s.num_computed, end))

    def copy(self, source, source_block, target, target_block, num_slots=None) -> None:
        for offset in range(self.config.block_size if num_slots is None else num_slots):
            target[target_block, offset] = source.get((source_block, offset), ("never written",))

    def write(self, stream: Stream, position: int) -> None:
        index, offset = divmod(position, self.config.block_size)
        for group, table in enumerate(self.manager.block_tables(stream.seq_id)):
            self.device[int(table[index]), offset] = stream.past(group, position)

    @precondition(lambda self: self.is_planning)
    @rule(drawn=drawn_tokens, aborted=st.integers(0, NOBODY))
    def commit(self, drawn, aborted):
        for operation in list(self.operations()):
            operation()
        planned = [stream for stream in self.streams if stream.end is not None]
        for stream in planned:
            self.check_slots(stream, stream.num_computed, stream.end)
        if aborted < len(self.streams):
            self.leave(self.streams[aborted])
        self.manager.settle(self.manager.step)
        for index, stream in enumerate(planned):
            if stream in self.streams:
                stream.num_computed, stream.end = stream.end, None
                self.manager.publish(stream.seq_id, stream.token_ids, stream.num_computed)
                if stream.num_slots:
                    self.manager.shrink(stream.seq_id, stream.num_computed)
                    stream.num_slots = 0
                if stream.num_computed == len(stream.token_ids):
                    self.draw(stream, drawn >> index & 1)
        self.end_step()

    def draw(self, stream: Stream, token_id: int) -> None:
        if len(stream.token_ids) == self.max_tokens:
            self.manager.publish_tail(stream.seq_id, stream.token_ids, stream.num_computed)
            self.leave(stream)
        else:
            stream.token_ids.append(token_id)
            stream.may_fork = True

    @precondition(lambda self: self.is_planning)
    @rule(num_done=st.sampled_from([0, 0, 1, 2, 4, 8, 60]))
    def fail(self, num_done):
        for operation in list(self.operations())[:num_done]:
            operation()
        for stream in self.streams:
            if stream.is_unsettled and stream.state != "waiting":
                self.stop(stream)
        self.manager.revert(self.manager.step)
        self.end_step()

    def end_step(self) -> None:
        self.is_planning = False
        for stream in self.streams:
            stream.end, stream.is_unsettled = None, False

    # Between steps

    @precondition(lambda self: not self.is_planning and self.idle("running") and len(self.streams) < MAX_STREAMS)
    @rule(index=which, token_id=st.none() | st.integers(0, 1))
    def fork(self, index, token_id):
        """With the same last token, which is not computed yet, or another one (a beam)."""
        parent = self.pick(index, "running")
        if parent.may_fork:
            child = replace(parent, seq_id=self.num_seqs, token_ids=list(parent.token_ids))
            if token_id is not None:
                child.token_ids[-1] = token_id
            self.num_seqs += 1
            self.manager.fork(parent.seq_id, child.seq_id)
            self.streams.append(child)

    @precondition(lambda self: not self.is_planning and self.streams)
    @rule(index=which)
    def end(self, index):
        stream = self.streams[index % len(self.streams)]
        if stream.state == "running":
            self.manager.publish_tail(stream.seq_id, stream.token_ids, stream.num_computed)
        self.leave(stream)

    def leave(self, stream: Stream) -> None:
        if stream.state != "waiting":
            self.manager.free(stream.seq_id)
        self.manager.forget(stream.seq_id)
        self.streams.remove(stream)

    @precondition(lambda self: not self.is_planning and self.caching and self.streams)
    @rule(index=which, num_tokens=st.integers(1, 20))
    def pin(self, index, num_tokens):
        stream = self.streams[index % len(self.streams)]
        token_ids = stream.token_ids[:num_tokens]
        try:
            pin = self.manager.pins.pin(token_ids, stream.key)
        except RequestError:
            return
        assert pin.num_tokens <= len(token_ids)
        self.pins.append((pin, token_ids, stream.key))

    @precondition(lambda self: not self.is_planning and self.pins)
    @rule(index=st.integers(0, 5))
    def unpin(self, index):
        pin, _, _ = self.pins.pop(index % len(self.pins))
        self.manager.pins.unpin(pin.pin_id)

    # What must hold

    def check_slots(self, stream: Stream, start: int, end: int) -> None:
        """All that the tokens from `start` to `end` see holds the sequence's own past."""
        slots = self.host if stream.state == "swapped" else self.device
        for group, (table, window) in enumerate(
            zip(self.manager.block_tables(stream.seq_id), self.windows, strict=True)
        ):
            for position in range(0 if window is None else max(0, start - window + 1), end):
                index, offset = divmod(position, self.config.block_size)
                held = slots.get((int(table[index]), offset))
                assert held == stream.past(group, position), f"{stream} reads {held} at {position} in group {group}"

    @invariant()
    def remembered_hit_lengths_are_those_of_a_lookup(self):
        for stream in self.streams:
            if stream.state == "waiting":
                asked = stream.seq_id, stream.token_ids, stream.key
                num_cached = self.manager.num_cached_tokens(*asked)
                assert num_cached == self.manager.look_up(*asked).num_blocks * self.config.block_size

    @invariant()
    def sequences_keep_their_past(self):
        for stream in [] if self.is_planning else self.streams:
            if stream.state != "waiting" and stream.seq_id not in self.manager._copies:
                self.check_slots(stream, stream.num_computed, stream.num_computed)

    @invariant()
    def nothing_is_lost_or_held_twice(self):
        self.manager.check_integrity()
        for stream in self.streams:
            if stream.state == "running":
                _, num_held = self.manager.gain([stream.seq_id])
                assert num_held <= self.config.blocks_to_hold(max(stream.num_slots, len(stream.token_ids)))

    @invariant()
    def every_looked_up_token_is_a_hit_or_a_miss(self):
        stats = self.manager.stats
        assert stats.num_queried_tokens == stats.num_hit_tokens + sum(stats.num_missed_tokens.values())
        assert stats.num_queried_tokens == (self.num_queried if self.caching else 0)

    @invariant()
    def pinned_prefixes_stay(self):
        assert self.manager.pins.num_blocks <= self.manager.pins.max_blocks
        for pin, token_ids, key in self.pins:
            hit = self.manager.look_up(PROBE, [*token_ids, 0], key)
            self.manager.forget(PROBE)
            assert hit.num_blocks >= pin.num_tokens // self.config.block_size

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for stream in list(self.streams):
            self.leave(stream)
        for pin, _, _ in self.pins:
            self.manager.pins.unpin(pin.pin_id)
        self.manager.revert(self.manager.step)
        self.manager.check_integrity()
        assert self.manager.num_used_blocks == 0
        assert self.manager.tiers.pools[1].num_free_blocks == self.config.num_host_blocks


BlockManagerMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None, report_multiple_bugs=False
)
TestBlockManager = pytest.mark.essential(BlockManagerMachine.TestCase)
