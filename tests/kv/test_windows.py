"""Blocks behind a sliding window are given back while a sequence runs, and the cache needs only what a window shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.kv_cache import MAX_BLOCKS_PER_SEQ
from quire.kv.block_space_manager import AllocStatus
from quire.kv.prefix_cache.content_hash import NO_KEY

from .managers import compute, do_step, end, make_config, make_manager, run

TOKENS = list(range(24))


@pytest.mark.parametrize("window", range(1, 11))
def test_just_the_blocks_that_the_next_token_sees_are_kept(window):
    manager = make_manager(12, (window,))
    manager.allocate(manager.look_up(0, TOKENS))
    for num_computed in range(4, 25, 4):
        manager.advance()
        compute(manager, 0, TOKENS, num_computed - 4, num_computed)
        first_seen = max(0, num_computed - window + 1)  # of the token at `num_computed`
        assert manager.num_used_blocks == num_computed // 4 - first_seen // 4
    end(manager, 0)
    assert manager.num_used_blocks == 0


def test_what_slid_out_stays_in_the_cache_until_it_is_needed():
    manager = make_manager(12, (4,))
    run(manager, 0, TOKENS, chunk=4)
    assert manager.num_used_blocks == 1
    assert run(manager, 1, [*TOKENS[:8], 90]) == 8
    assert run(manager, 2, [*TOKENS[:16], 91]) == 16


@pytest.mark.parametrize(("windows", "num_cached"), [((6,), 20), ((None,), 0), ((None, 6), 0)])
def test_a_hit_needs_only_what_the_window_shows(windows, num_cached):
    """The beginning has been evicted: full attention cannot go on without it, a window can."""
    manager = make_manager(24, windows)
    run(manager, 0, TOKENS, chunk=4)
    first_block = manager.prefixes.lookup.chain(TOKENS, NO_KEY).block(0)
    beginning = [manager.prefixes.cache.tracker.find(g, *first_block) for g in range(manager.num_groups)]
    end(manager, 0)
    for place in beginning:
        manager.prefixes.cache.forget(place.block_id)
    assert run(manager, 1, [*TOKENS[:20], 90]) == num_cached


def test_a_hit_holds_no_block_behind_the_window():
    manager = make_manager(24, (None, 6))
    run(manager, 0, TOKENS)
    end(manager, 0)
    hit = manager.look_up(1, [*TOKENS[:20], 90])
    assert hit.num_blocks == 5
    assert hit.first == (0, 3)  # the token at 20 sees 15 to 20
    assert [len(places) for places in hit.places] == [5, 2]


def test_a_prefix_ends_at_a_hole_in_the_window():
    manager = make_manager(24, (6,))
    run(manager, 0, TOKENS, chunk=4)
    end(manager, 0)
    chain = manager.prefixes.lookup.chain(TOKENS, NO_KEY)
    manager.prefixes.cache.forget(manager.prefixes.cache.tracker.find(0, *chain.block(3)).block_id)
    assert manager.look_up(1, [*TOKENS, 90]).num_blocks == 6  # which sees blocks 4 and 5
    assert manager.look_up(2, [*TOKENS[:20], 90]).num_blocks == 3  # which would see block 3
    manager.prefixes.cache.forget(manager.prefixes.cache.tracker.find(0, *chain.block(5)).block_id)
    assert manager.look_up(3, [*TOKENS, 90]).num_blocks == 3


def test_layers_with_windows_need_fewer_blocks_than_full_ones():
    """One group of full attention and three of a window of eight tokens, over a prompt of 96."""
    tokens = list(range(96))
    peaks = {}
    for window in (None, 8):
        manager = make_manager(100, (None, window, window, window), max_chunk=8)
        assert manager.can_allocate(manager.look_up(0, tokens)) is AllocStatus.OK
        manager.allocate(manager.look_up(0, tokens))
        peaks[window] = 0
        for start in range(0, 96, 8):
            manager.append(0, start, start + 8)
            peaks[window] = max(peaks[window], manager.num_used_blocks)
            manager.publish(0, tokens, start + 8)
    assert peaks == {None: 4 * 24, 8: 24 + 3 * 4}


def test_the_context_that_fits_grows_where_layers_have_windows():
    assert make_config(40, (None, None)).max_tokens == 80
    # (8 - 1 + 8) // 4 + 3 blocks are the most that a window of 8 and a chunk of 8 take
    assert make_config(40, (None, 8), max_chunk=8).max_tokens == 4 * (40 - 6)
    assert make_config(40, (None, 8)).max_tokens == 80, "a chunk of any size"
    assert make_config(40, (8, 8), max_chunk=8).max_tokens == 4 * MAX_BLOCKS_PER_SEQ
    assert make_config(11, (8, 8), max_chunk=8).max_tokens == 20, "too small for two windows: what fits into five"


@given(
    num_blocks=st.integers(1, 60),
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=3),
    max_chunk=st.none() | st.integers(1, 30),
)
def test_max_tokens_is_the_most_that_fits(num_blocks, windows, max_chunk):
    config = make_config(num_blocks, windows, max_chunk=max_chunk)
    assert config.blocks_to_hold(config.max_tokens) <= num_blocks
    if config.max_tokens < 4 * MAX_BLOCKS_PER_SEQ:
        assert config.blocks_to_hold(config.max_tokens + 1) > num_blocks


def test_only_what_the_windows_show_is_swapped():
    manager = make_manager(24, (None, 4), num_host_blocks=8)
    run(manager, 0, TOKENS, chunk=4)
    assert manager.can_swap_out([0])
    manager.swap_out([0])
    assert len(do_step(manager)[0]) == 6 + 1
    assert manager.can_swap_in([0], 25)
    manager.swap_in([0])
    assert len(do_step(manager)[1]) == 6 + 1
    manager.check_integrity()
    end(manager, 0)


def test_a_fork_keeps_what_its_parent_lets_go():
    manager = make_manager(24, (4,))
    run(manager, 0, TOKENS[:8], chunk=4)
    manager.fork(0, 1)
    shared = manager.block_tables(1)[0][1]
    manager.advance()
    compute(manager, 0, TOKENS, 8, 16)
    assert manager.pool.ref_counts[shared] == 1
    manager.advance()
    compute(manager, 1, [*TOKENS[:8], *[90] * 8], 8, 16)
    assert manager.pool.ref_counts[shared] == 0
    end(manager, 0, 1)
    assert manager.num_used_blocks == 0
