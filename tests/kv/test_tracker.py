"""What blocks contain is found by its hash or by what it follows, and each change of it is reported."""

import pytest

from quire.kv.prefix_cache.content_hash import token_bytes
from quire.kv.prefix_cache.tracker import MAX_TAIL_CANDIDATES, BlockContent, BlockTracker, EvictedHashes

from .managers import make_pool


@pytest.fixture
def changes():
    return []


@pytest.fixture
def tracker(changes):
    return BlockTracker(1, lambda depth, block_hash: changes.append((depth, block_hash)), 0)


def content(token_ids: list[int], block_hash: bytes | None = None, parent: bytes = b"parent") -> BlockContent:
    return BlockContent(0, parent, token_bytes(token_ids), 3, block_hash)


def test_only_the_newest_blocks_behind_a_prefix_are_looked_at_for_a_tail():
    class Counted(dict):
        num_read = 0

        def __reversed__(self):
            for key in super().__reversed__():
                self.num_read += 1
                yield key

    tracker = make_pool(200).tracker
    for block_id in range(200):
        tracker.add(block_id, BlockContent(0, b"parent", token_bytes([block_id, 7]), 1, None))
    children = tracker._children[0][b"parent"] = Counted(tracker._children[0][b"parent"])
    assert tracker.find_tail(0, b"parent", token_bytes([150, 9])) == (150, 1)
    assert tracker.find_tail(0, b"parent", token_bytes([100, 7])) is None, "too old"
    assert children.num_read <= 2 * MAX_TAIL_CANDIDATES


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_tail_with_the_most_tokens_in_common_is_found_whatever_its_age(tracker, order):
    tails = [[1], [1, 2, 3], [1, 2]]
    for block_id in order:
        tracker.add(block_id, content(tails[block_id]))
    assert tracker.find_tail(0, b"parent", token_bytes([1, 2, 3, 4])) == (1, 3)


def test_a_block_whose_content_grows_is_found_by_the_new_content_only(tracker):
    tracker.add(0, content([1, 2]))
    tracker.add(0, content([9, 9], parent=b"other"))
    tracker.check_integrity()
    assert tracker.find_tail(0, b"parent", token_bytes([1, 2])) is None
    assert tracker.find_tail(0, b"other", token_bytes([9])) == (0, 1)
    assert tracker.get(0) is tracker[0]
    assert tracker.get(1) is None


def test_a_full_block_is_reported_when_it_can_be_found_and_when_it_no_longer_can(tracker, changes):
    tracker.add(0, content([1, 2, 3]))
    assert changes == [], "part of a block is no whole block"
    tracker.add(0, content([1, 2, 3, 4], b"full"))
    assert changes == [(3, b"full")]
    tracker.discard(0)
    tracker.discard(0)
    assert changes == [(3, b"full")] * 2


def test_a_hit_is_counted_for_each_lookup_that_found_the_block(tracker):
    tracker.add(0, content([1]))
    tracker.add(1, content([2]))
    tracker.count_hits([0, 5])
    tracker.count_hits([0])
    assert [tracker[block_id].num_hits for block_id in (0, 1)] == [2, 0]


def test_while_a_view_is_open_every_block_whose_content_or_hits_change_is_noted(tracker):
    tracker.add(0, content([1]))
    tracker.touched = set()
    tracker.add(1, content([2]))
    assert tracker.touched == {1}
    tracker.touched.clear()
    tracker.discard(0)
    tracker.discard(0)
    assert tracker.touched == {0}
    tracker.touched.clear()
    tracker.discard(7)
    assert not tracker.touched, "its content was unknown"
    tracker.count_hits([1])
    assert tracker.touched == {1}


def test_the_latest_evicted_hashes_are_remembered_until_they_are_cached_again(monkeypatch):
    monkeypatch.setattr("quire.kv.prefix_cache.tracker.MAX_EVICTED_HASHES", 2)
    evicted = EvictedHashes()
    for block_hash in (b"a", b"b", b"c"):
        evicted.add(block_hash)
    assert [block_hash in evicted for block_hash in (b"a", b"b", b"c")] == [False, True, True]
    evicted.discard(b"c")
    evicted.discard(b"never added")
    assert b"c" not in evicted
    assert b"b" in evicted
    evicted.most = 0
    evicted.discard(b"b")
    evicted.add(b"d")
    assert b"d" not in evicted
