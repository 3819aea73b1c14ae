"""Content moves outward when it is evicted, copies run in the order in which they can, and what was lost is known."""

from functools import partial

from quire.common.batch import Transfer
from quire.kv.block_pool import BlockPool
from quire.kv.block_table import BlockTable
from quire.kv.place import Place
from quire.kv.prefix_cache.content_hash import token_bytes
from quire.kv.prefix_cache.stats import PrefixCacheStats
from quire.kv.prefix_cache.tracker import BlockContent
from quire.kv.tiers import Tiers

from .managers import make_config


def make_tiers(num_blocks: int, num_host_blocks: int, num_further_blocks: int = 0) -> tuple[Tiers, PrefixCacheStats]:
    """The device and the host tier, and a tier behind them if it has blocks."""
    stats = PrefixCacheStats()
    tiers = Tiers(make_config(num_blocks, num_host_blocks=num_host_blocks), stats, lambda *_: None)
    if num_further_blocks:
        tiers.pools.append(BlockPool(num_further_blocks, 1, partial(tiers._evicted, 2), lambda *_: None, 2))
    return tiers, stats


def cache(pool: BlockPool, number: int, num_tokens: int = 4) -> None:
    """Have a block cached, of content that `number` identifies; with fewer than four tokens it is partly full."""
    block_id = pool.allocate()
    block_hash = bytes([number]) if num_tokens == 4 else None
    pool.tracker.add(block_id, BlockContent(0, b"parent", token_bytes([number] * num_tokens), 0, block_hash))
    pool.free(block_id)


def found(tiers: Tiers, number: int) -> list[int]:
    """The tiers that have this content."""
    tokens = token_bytes([number] * 4)
    return [tier for tier, pool in enumerate(tiers.pools) if pool.tracker.find(0, bytes([number]), tokens) is not None]


def test_what_a_tier_evicts_to_make_room_goes_on_outward_and_is_copied_first():
    tiers, stats = make_tiers(1, 1, 2)
    cache(tiers.pools[0], 1)
    cache(tiers.pools[0], 2)
    assert tiers.take_transfers(1) == (Transfer(0, 1, ((0, 0),)),)
    tiers.settle(1)
    cache(tiers.pools[0], 3)
    assert tiers.take_transfers(2) == (Transfer(1, 2, ((0, 0),)), Transfer(0, 1, ((0, 0),)))
    tiers.settle(2)
    assert [found(tiers, number) for number in (1, 2, 3)] == [[2], [1], [0]]
    assert (stats.num_spilled_tokens, stats.num_evicted_tokens) == (12, 0)


def test_copies_towards_the_device_come_last_and_the_furthest_of_them_first():
    tiers, _ = make_tiers(3, 2, 2)
    held = [tiers.pools[tier].allocate() for tier in range(3)]
    for tier in (1, 2):
        tiers.bring(Place(tier, held[tier]))
    tiers.move([BlockTable([held[0]])], 0, 1)
    transfers = tiers.take_transfers(1)
    assert [(transfer.source_tier, transfer.target_tier) for transfer in transfers] == [(0, 1), (2, 0), (1, 0)]


def test_what_is_evicted_while_another_tier_has_it_is_not_lost():
    tiers, stats = make_tiers(1, 1)
    cache(tiers.pools[0], 1)
    cache(tiers.pools[1], 1)
    cache(tiers.pools[1], 2)
    assert stats.num_evicted_tokens == 0
    assert bytes([1]) not in tiers.evicted
    cache(tiers.pools[1], 3)
    assert stats.num_evicted_tokens == 4
    assert bytes([2]) in tiers.evicted


def test_a_partly_full_block_is_not_worth_a_copy():
    tiers, stats = make_tiers(1, 1)
    cache(tiers.pools[0], 1, num_tokens=3)
    cache(tiers.pools[0], 2)
    assert tiers.take_transfers(1) == ()
    assert (stats.num_spilled_tokens, stats.num_evicted_tokens) == (0, 3)


def test_what_a_failed_step_was_to_spill_is_lost():
    tiers, stats = make_tiers(1, 2)
    cache(tiers.pools[0], 1)
    cache(tiers.pools[0], 2)
    tiers.take_transfers(1)
    tiers.settle(1)
    cache(tiers.pools[0], 3)
    tiers.take_transfers(2)
    assert found(tiers, 2) == [1]
    tiers.revert(2)
    assert [found(tiers, number) for number in (1, 2, 3)] == [[1], [], [0]]
    assert stats.num_evicted_tokens == 4
    assert bytes([2]) in tiers.evicted
    assert tiers.holds(1) == {}
    for pool in tiers.pools:
        pool.check_integrity()


def test_an_open_view_gets_what_left_the_device_in_order():
    tiers, _ = make_tiers(1, 1)
    tiers.journal = []
    for number in (1, 2, 3):
        cache(tiers.pools[0], number)
    assert tiers.journal == [("spilled", 0), ("evicted", 0)], "a planned copy holds the only block of the host tier"
    tiers.take_transfers(1)
    tiers.settle(1)
    tiers.journal.clear()
    cache(tiers.pools[0], 4)
    assert tiers.journal == [("spilled", 0)], "what leaves the host tier is not noted"
