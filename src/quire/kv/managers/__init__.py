"""One manager for each kind of KVCacheSpec: which blocks of a sequence its groups keep."""

from quire.config.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    LatentSpec,
    NoCacheSpec,
    SlidingWindowSpec,
)
from quire.kv.managers.attention import FullAttentionManager, SlidingWindowManager
from quire.kv.managers.base import GroupManager
from quire.kv.managers.no_cache import NoCacheManager

MANAGERS: dict[type[KVCacheSpec], type[GroupManager]] = {
    FullAttentionSpec: FullAttentionManager,
    LatentSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    NoCacheSpec: NoCacheManager,
}
"""A new kind of spec is an entry here."""


def make_managers(config: KVCacheConfig) -> tuple[GroupManager, ...]:
    """The manager of each group."""
    return tuple(MANAGERS[type(group.spec)](group.spec, config.block_size) for group in config.groups)
