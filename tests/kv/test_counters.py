"""What lookups found and missed is counted once, exactly, and under names that metrics keep."""

import json

from quire.kv.prefix_cache.stats import PrefixCacheStats

from .managers import compute, end, make_manager, run


def test_all_counters_have_names_and_whole_numbers():
    manager = make_manager(3, num_host_blocks=1)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    run(manager, 1, [1, 2, 3, 4, 5, 6, 7])
    end(manager, 0, 1)
    run(manager, 2, [9] * 12)
    expected = {
        "queried": 5 + 6 + 11,
        "hit": 6,
        "hit_device": 4,
        "hit_host": 0,
        "hit_joined": 0,
        "hit_tail": 2,
        "missed_never_seen": 5 + 11,
        "missed_evicted": 0,
        "missed_other_key": 0,
        "missed_not_computed": 0,
        "evicted": 2 + 3,
        "spilled": 4,
    }
    assert json.dumps(manager.stats.to_dict()) == json.dumps(expected)


def test_tails_add_up_and_are_no_misses():
    manager = make_manager(12)
    for seq_id, tokens in enumerate(([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8])):
        run(manager, seq_id, tokens)
    assert manager.stats.num_tail_hit_tokens == 2 + 2
    assert manager.stats.num_hit_tokens == 2 * 6
    assert sum(manager.stats.num_missed_tokens.values()) == 5


def test_the_hit_rate_is_the_share_of_what_was_looked_up():
    manager = make_manager(12)
    assert manager.stats.hit_rate == 0
    run(manager, 0, [1] * 9)
    run(manager, 1, [1] * 9)
    assert manager.stats.hit_rate == 0.5


def test_a_single_token_that_was_found_is_a_rate_of_one():
    stats = PrefixCacheStats()
    stats.num_queried_tokens = stats.num_tail_hit_tokens = 1
    assert stats.hit_rate == 1


def test_a_fork_that_starts_again_is_not_counted_as_a_lookup():
    manager = make_manager(12)
    run(manager, 0, [1] * 6)
    manager.fork(0, 1)
    manager.free(1)
    manager.allocate(manager.look_up(1, [1] * 7))
    assert manager.stats.num_queried_tokens == 5


def test_a_block_counts_its_hits_as_long_as_its_content_stays():
    manager = make_manager(12)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    run(manager, 0, tokens[:6])
    run(manager, 1, [*tokens[:6], 9])
    whole, tail = manager.block_tables(0)[0].tolist()
    tracker = manager.pool.tracker
    assert (tracker[whole].num_hits, tracker[tail].num_hits) == (1, 1)
    compute(manager, 0, tokens, 6, 8)
    assert (tracker[whole].num_hits, tracker[tail].num_hits) == (1, 0), "the second block has other content now"
