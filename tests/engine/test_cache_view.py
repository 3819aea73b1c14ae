"""A watcher receives what the cache and the queues contain; without watchers nothing is recorded."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.requests.sequence import SequenceGroup
from quire.engine.view import cache_view
from quire.engine.view.cache_frame import CACHED, OWNED, PINNED, CacheMirror, CacheUpdate
from quire.engine.view.cache_view import CacheView
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from tests.effort import examples

from .fake import Harness
from .test_schedule import requests


class NoGrammars:
    def __len__(self) -> int:
        return 0

    def queued(self, limit: int) -> list[SequenceGroup]:
        return []


class Watch:
    """A view of a harness, and what its frames contained."""

    def __init__(self, harness: Harness) -> None:
        parts = {"scheduler": harness.scheduler, "blocks": harness.blocks, "committer": harness.committer}
        self.view = CacheView(SimpleNamespace(**parts, grammars=NoGrammars()), clock=lambda: 0.0)
        self.mirror = CacheMirror()
        self.now = 0.0
        self.frames: list[CacheUpdate] = []

    def look(self) -> CacheUpdate | None:
        self.now += 1
        data = self.view.frame(self.now)
        if data is None:
            return None
        frame = msgspec.json.decode(data, type=CacheUpdate)
        self.mirror.apply(frame)
        self.frames.append(frame)
        return frame

    def catch_up(self) -> None:
        while self.look() is not None:
            pass

    @property
    def seen(self) -> tuple:
        mirror = self.mirror
        return mirror.setup, mirror.tiers, mirror.requests, mirror.counters

    @property
    def events(self) -> list[tuple[str, str, str]]:
        return [(event.kind, event.request_id, event.reason) for frame in self.frames for event in frame.events]


@settings(max_examples=examples(150), deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(15, 30),
    windows=st.sampled_from([(None,), (None, None), (6,), (None, 6)]),
    max_num_seqs=st.integers(3, 6),
    max_num_batched_tokens=st.integers(1, 20),
    caching=st.booleans(),
    num_host_blocks=st.integers(0, 16),
    preemption_mode=st.sampled_from([None, "swap", "recompute"]),
    failing_steps=st.sets(st.integers(0, 20), max_size=2),
    policy=st.sampled_from(["fcfs", "fair"]),
    max_blocks=st.sampled_from([1, 4, 3072]),
    looks=st.lists(st.integers(0, 2), min_size=40, max_size=40),
)
def test_a_snapshot_and_its_differences_equal_a_new_snapshot(requests, max_blocks, looks, failing_steps, **config):
    """Whatever happens between frames, and however many of the blocks fit into one."""
    harness = Harness(**config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_view, "MAX_BLOCKS", max_blocks)
        watch = Watch(harness)
        for turn, num_looks in enumerate(looks):
            if turn < len(requests):
                harness.add(**requests[turn])
            if harness.requests.running and turn % 7 == 3:
                harness.scheduler.preemptor.preempt(harness.requests.running[-1])
            if harness.requests.running and turn % 11 == 9:
                harness.requests.remove(harness.requests.running[0])
            harness.executor.fail_next = turn in failing_steps
            try:
                harness.step()
            except RuntimeError:
                assert turn in failing_steps
            for _ in range(num_looks):
                watch.look()
        watch.catch_up()
        fresh = Watch(harness)
        fresh.catch_up()
    assert watch.seen == fresh.seen
    check_against_blocks(fresh, harness)


def check_against_blocks(watch: Watch, harness: Harness) -> None:
    """The frames contain what the block manager has."""
    for name, pool in (("device", harness.blocks.pool), ("host", harness.blocks.tiers.pools[1])):
        rows = watch.mirror.tiers[name]
        assert {b: row["refs"] for b, row in rows.items() if row["refs"]} == {
            b: count for b, count in enumerate(pool.ref_counts) if count
        }
        assert sum(row["states"] == CACHED for row in rows.values()) + sum(
            row["states"] >= OWNED for row in rows.values()
        ) == len(rows)
        assert {b for b, row in rows.items() if row["states"] == CACHED} == set(pool.evictor._places)
    holders: dict[tuple[int, int], set[int]] = {}
    for seq_id, tier, tables in harness.blocks.holdings():
        for table in tables:
            for block_id in table.ids():
                holders.setdefault((tier, block_id), set()).add(harness.requests.owners[seq_id][0].order)
    assert holders == {
        (int(name == "host"), block_id): set(row["owners"])
        for name, blocks in watch.mirror.tiers.items()
        for block_id, row in blocks.items()
        if row["owners"]
    }


def test_a_second_request_is_seen_to_share_the_first_ones_blocks():
    harness = Harness(num_blocks=20, max_num_batched_tokens=32)
    watch = Watch(harness)
    harness.add([1] * 8 + [2], 8)
    harness.step()
    watch.look()
    harness.add([1] * 8 + [3], 8)
    harness.step()
    frame = watch.look()
    shared = {b: row for b, row in watch.mirror.tiers["device"].items() if row["refs"] == 2}
    assert [(row["owners"], row["hits"], row["depths"], row["filled"]) for row in shared.values()] == [
        ([0, 1], 1, 0, 4),
        ([0, 1], 1, 1, 4),
    ]
    first, second = shared.values()
    assert second["parents"] == first["hashes"] != 0
    assert [(row.order, row.num_cached_tokens) for row in frame.requests] == [(0, 0), (1, 8)]
    assert frame.counters["prefix_hit"] == 8
    assert frame.setup is None


def test_blocks_on_their_way_are_owned_until_they_are_cached():
    harness = Harness(num_blocks=6, max_num_batched_tokens=4)
    watch = Watch(harness)
    group = harness.add([1, 2, 3, 4, 5, 6], 1)
    harness.step()
    watch.look()
    assert [(row.stage, row.num_computed_tokens) for row in watch.mirror.requests.values()] == [("prefill", 4)]
    harness.run()
    watch.look()
    rows = watch.mirror.tiers["device"]
    assert sorted((row["states"], row["filled"], row["depths"]) for row in rows.values()) == [
        (CACHED, 2, 1),
        (CACHED, 4, 0),
    ]
    assert watch.mirror.requests == {}
    finished = [event for event in watch.mirror.events if event.kind == "finished"]
    assert [(event.request_id, event.reason) for event in finished] == [(group.request_id, "length")]
    metrics = group.metrics
    assert finished[0].ttft_s == metrics.first_token_time - metrics.arrival_time
    assert finished[0].inter_token_s is None  # it has one token


def test_pinned_blocks_are_reported_as_such():
    harness = Harness(num_blocks=8, max_num_batched_tokens=32)
    harness.add([1] * 8, 1)
    harness.run()
    watch = Watch(harness)
    watch.look()
    pin = harness.blocks.pins.pin([1] * 8)
    watch.look()
    states = [row["states"] for row in watch.mirror.tiers["device"].values()]
    assert states.count(PINNED) == 2
    harness.blocks.pins.unpin(pin.pin_id)
    watch.look()
    assert PINNED not in [row["states"] for row in watch.mirror.tiers["device"].values()]


def test_events_are_reported_in_order():
    harness = Harness(num_blocks=6, num_host_blocks=6, max_num_batched_tokens=32, preemption_mode="swap")
    watch = Watch(harness)
    for token in range(3):
        harness.add([token] * 6, 12)
    while harness.requests:
        harness.step()
        watch.look()
    of_last = [(kind, reason) for kind, request_id, reason in watch.events if request_id == "2"]
    assert of_last[:3] == [("started", ""), ("swapped out", ""), ("swapped in", "")]
    assert of_last[-1] == ("finished", "length")


def test_evictions_and_forks_are_reported():
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    watch = Watch(harness)
    for token in range(4):
        harness.add([token] * 6, 5, n=2)
        while harness.requests:
            harness.step()
            watch.look()
    counts: dict[str, int] = {}
    for frame in watch.frames:
        for event in frame.events:
            counts[event.kind] = counts.get(event.kind, 0) + event.count
    assert counts["forked"] == 4
    assert counts["started"] == counts["finished"] == 4
    assert counts["evicted"] > 0


def test_an_aborted_request_ends_as_such():
    harness = Harness(num_blocks=8)
    watch = Watch(harness)
    group = harness.add([1, 2, 3], 8)
    harness.step()
    harness.requests.remove(group)
    group.seqs[0].finish(type(group.seqs[0].status).FINISHED_ABORTED)
    watch.look()
    assert ("finished", group.request_id, "abort") in watch.events
    assert watch.mirror.requests == {}


def test_nothing_of_a_prompt_is_returned():
    harness = Harness(num_blocks=8, max_num_batched_tokens=32)
    watch = Watch(harness)
    harness.add([41] * 7, 2, key=ContentKey(cache_salt="salt"))
    harness.run()
    watch.catch_up()
    data = msgspec.json.encode(watch.frames)
    assert b"salt" not in data
    assert b"[41," not in data


def test_frames_keep_their_distance_and_stay_cheap(monkeypatch):
    monkeypatch.setattr(cache_view, "COST_SHARE", 0.01)
    harness = Harness(num_blocks=8)
    times = iter([0.0, 0.0, 5.0, 5.004, 9.0, 10.0, 20.0, 20.0])
    watch = Watch(harness)
    watch.view._clock = lambda: next(times)

    def looks_at(now: float) -> bool:
        harness.scheduler.num_steps += 1  # there is something to tell
        return watch.view.frame(now) is not None

    assert looks_at(1.0)  # cost nothing
    assert not looks_at(1.05)
    assert looks_at(1.1)  # cost 4 ms: 400 ms is the distance that makes this 1 %
    assert not looks_at(1.4)
    assert looks_at(1.55)  # cost 1 s: more than MAX_INTERVAL_S nobody waits
    assert not looks_at(2.5)
    assert looks_at(2.6)


def test_nothing_is_said_while_nothing_happens():
    harness = Harness(num_blocks=8)
    watch = Watch(harness)
    assert watch.look() is not None
    assert watch.look() is None


def test_many_waiting_requests_are_counted_and_not_all_sent():
    harness = Harness(num_blocks=8, max_num_seqs=1)
    watch = Watch(harness)
    for _ in range(cache_view.MAX_QUEUED + 10):
        harness.add([1, 2], 1)
    watch.look()
    assert len(watch.mirror.requests) == cache_view.MAX_QUEUED
    assert watch.mirror.counters["waiting"] == cache_view.MAX_QUEUED + 10


def test_a_closed_view_leaves_nothing_behind():
    harness = Harness(num_blocks=6, num_host_blocks=2)
    watch = Watch(harness)
    harness.add([1] * 6, 2)
    watch.view.close()
    harness.run()
    blocks = harness.blocks
    assert harness.requests.journal is None
    assert blocks.tiers.journal is None
    assert [pool.tracker.touched for pool in blocks.tiers.pools] == [None, None]


@pytest.mark.parametrize("key", [NO_KEY, ContentKey(lora_id="adapter")])
def test_the_hits_of_a_block_outlive_watchers(key):
    harness = Harness(num_blocks=20, max_num_batched_tokens=32)
    for _ in range(3):
        harness.add([1] * 9, 1, key=key)
        harness.run()
    watch = Watch(harness)
    watch.look()
    full = [row for row in watch.mirror.tiers["device"].values() if row["hashes"]]
    assert [row["hits"] for row in sorted(full, key=lambda row: row["depths"])] == [2, 2]
