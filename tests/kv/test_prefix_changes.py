"""What a cache reports to a router is what a lookup finds in it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.prefix_cache.content_hash import ContentHasher, HashChain
from tests.effort import examples

from .managers import end, make_manager, run

KEY = b"k" * 32


def hashes(tokens: list[int]) -> list[bytes]:
    chain = HashChain(ContentHasher(KEY), 4)
    chain.extend(len(tokens) // 4, tokens)
    return chain.blocks()


@settings(max_examples=examples(60), deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=12),
    num_host_blocks=st.sampled_from([0, 3]),
)
def test_the_reports_add_up_to_what_can_be_found(prompts: list[list[int]], num_host_blocks: int) -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=num_host_blocks)
    changes, known = manager.share_hashes(KEY), set[bytes]()
    for seq_id, tokens in enumerate(prompts):
        run(manager, seq_id, tokens)
        end(manager, seq_id)
        found, gone = changes.take()
        assert known.isdisjoint(found)
        assert known.issuperset(gone)
        known = known.union(found).difference(gone)
        for prompt in prompts[: seq_id + 1]:
            own = hashes(prompt)
            held = next((place for place, block_hash in enumerate(own) if block_hash not in known), len(own))
            longest = manager.look_up(10_000, [*prompt, 9]).num_blocks
            manager.forget(10_000)
            assert longest == held
    manager.forget_cached()
    assert set(changes.take()[1]) == known
    assert changes.take() == ([], [])


def test_what_comes_and_goes_between_two_reports_is_in_neither() -> None:
    manager = make_manager(num_blocks=4)
    changes = manager.share_hashes(KEY)
    for seq_id in range(2):
        run(manager, seq_id, [seq_id] * 13)
        end(manager, seq_id)
    assert changes.take() == (hashes([1] * 12), [])


def test_without_prefix_caching_nothing_is_reported() -> None:
    manager = make_manager(num_blocks=8, caching=False)
    changes = manager.share_hashes(KEY)
    run(manager, 0, [1] * 8)
    assert changes.take() == ([], [])


def test_a_key_is_shared_before_anything_is_cached() -> None:
    manager = make_manager(num_blocks=8)
    run(manager, 0, [1] * 8)
    with pytest.raises(AssertionError):
        manager.share_hashes(KEY)


@pytest.mark.parametrize("windows", [(None, 4), (4, None)])
def test_a_prefix_that_is_found_is_reported_whole_though_some_layers_have_windows(
    windows: tuple[int | None, ...],
) -> None:
    """The blocks behind the window of the first sequence are evicted for the second."""
    manager, first, second = make_manager(num_blocks=10, windows=windows), [1] * 17, [2] * 8
    changes, known = manager.share_hashes(KEY), set[bytes]()
    for seq_id, tokens in enumerate((first, second)):
        run(manager, seq_id, tokens, chunk=4)
        end(manager, seq_id)
        found, gone = changes.take()
        known = known.union(found).difference(gone)
    assert manager.look_up(10_000, first).num_blocks == 4
    assert known.issuperset(hashes(first))


def test_what_was_evicted_and_is_cached_again_is_reported_again() -> None:
    manager, first, second = make_manager(num_blocks=3), [1] * 9, [2] * 9
    changes, reports = manager.share_hashes(KEY), []
    for seq_id, tokens in enumerate((first, second, first)):
        run(manager, seq_id, tokens)
        end(manager, seq_id)
        reports.append(tuple(map(set, changes.take())))
    assert [
        found >= set(hashes(tokens)) for (found, _), tokens in zip(reports, (first, second, first), strict=True)
    ] == [True] * 3
    assert reports[1][1] == set(hashes(first))


def test_a_change_is_looked_at_once() -> None:
    manager, seen = make_manager(num_blocks=8), list[bytes]()
    changes, tracker = manager.share_hashes(KEY), manager.pool.tracker
    for seq_id, tokens in enumerate(([1] * 4, [2] * 4)):
        run(manager, seq_id, tokens)
        seen += tracker.changed_hashes or []
        changes.take()
    assert tracker.changed_hashes == []
    assert sorted(seen) == sorted([*hashes([1] * 4), *hashes([2] * 4)])
