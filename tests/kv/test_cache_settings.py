"""The settings of the cache reach the block manager: whether prefixes are found, the reserve, the share of pins."""

import pytest

from quire.common.errors import RequestError
from quire.config.cache import CacheConfig
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.no_blocks import make_block_manager

from .managers import end, make_config, run

TOKENS = list(range(16))


def configured(**settings: object) -> BlockSpaceManager:
    """A manager of 10 blocks of four slots."""
    given = {"block_size": 4, "kv_cache_bytes": None, "num_blocks_override": 10, "memory_utilization": 0.9,
             "enable_prefix_caching": True} | settings  # fmt: skip
    return make_block_manager(make_config(10), CacheConfig(**given))


@pytest.mark.parametrize(("is_caching", "num_cached"), [(True, 15), (False, 0)])
def test_prefixes_are_found_where_caching_is_enabled(is_caching: bool, num_cached: int) -> None:
    manager = configured(enable_prefix_caching=is_caching)
    assert [run(manager, seq_id, TOKENS) for seq_id in (0, 1)] == [0, num_cached]


@pytest.mark.parametrize(("watermark", "reserve"), [(0.0, 0), (0.3, 3)])
def test_the_reserve_is_the_share_of_blocks_that_is_set(watermark: float, reserve: int) -> None:
    manager = configured(watermark=watermark)
    run(manager, 0, TOKENS)
    longest = manager.look_up(1, [99] * 4 * (6 - reserve))
    assert manager.can_allocate(longest) is AllocStatus.OK
    longer = manager.look_up(2, [99] * 4 * (7 - reserve))
    assert manager.can_allocate(longer) is AllocStatus.LATER


def test_pins_may_have_the_share_of_blocks_that_is_set() -> None:
    manager = configured(pinned_fraction=0.4)
    run(manager, 0, TOKENS)
    end(manager, 0)
    assert manager.pins.pin(TOKENS).num_blocks == 4
    run(manager, 1, [99] * 4)
    with pytest.raises(RequestError, match="4 of at most 4 are pinned"):
        manager.pins.pin([99] * 4)
