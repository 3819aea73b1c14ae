"""Pinned prefixes, which are not evicted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from quire.common.errors import RequestError
from quire.config.kv_cache import KVCacheConfig
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey, HashChain
from quire.kv.prefix_cache.lookup import PrefixHit, PrefixLookup
from quire.kv.prefix_cache.sharing import PrefixSharing


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that stays in the cache until it is unpinned."""

    pin_id: int
    num_tokens: int
    """The number of its tokens that are computed and kept."""
    num_blocks: int
    """The number of blocks that hold them, some of which other pins may share."""


class Pins:
    """Holds blocks of the device tier, up to a quota."""

    def __init__(self, config: KVCacheConfig, max_blocks: int, prefixes: PrefixSharing | None) -> None:
        """Without prefix caching (None) nothing can be pinned."""
        self.max_blocks = max_blocks
        self.block_ids: dict[int, list[int]] = {}
        """By pin, the blocks that it holds."""
        self._counts: Counter[int] = Counter()
        self._ids = count()
        self._config = config
        self._prefixes = prefixes

    @property
    def num_blocks(self) -> int:
        """The number of different blocks that are pinned."""
        return len(self._counts)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._counts

    def check(self, token_ids: Sequence[int], key: ContentKey = NO_KEY) -> None:
        """Raise RequestError if these tokens would take more blocks than may be pinned."""
        prefixes, hit, _ = self._find(token_ids, key)
        self._check(self._num_new_blocks(token_ids, prefixes.lookup, hit))

    def pin(self, token_ids: Sequence[int], key: ContentKey = NO_KEY) -> PinnedPrefix:
        """Hold what the device tier has of these tokens, the partly full block at the end too. Raises RequestError."""
        prefixes, hit, chain = self._find(token_ids, key)
        lookup = prefixes.lookup
        num_new_blocks = self._num_new_blocks(token_ids, prefixes.lookup, hit)
        while hit.needs_step:  # a shorter prefix may need other blocks of a window
            hit = lookup.find(-1, chain, token_ids, hit.num_ready_blocks * self._config.block_size)
        start = hit.num_blocks * self._config.block_size
        wanted = chain.content(start, min(start + self._config.block_size, len(token_ids)), token_ids)
        tails = lookup.find_tails(chain, hit.num_blocks, wanted)
        block_ids = hit.device_blocks + [block_id for _, block_id, _ in tails]
        self._check(max(num_new_blocks, len(set(block_ids) - self._counts.keys())))
        for block_id in block_ids:
            prefixes.cache.acquire(block_id)
        pin_id = next(self._ids)
        self.block_ids[pin_id] = block_ids
        self._counts.update(block_ids)
        return PinnedPrefix(pin_id, start + min((n for _, _, n in tails), default=0), len(block_ids))

    def unpin(self, pin_id: int) -> None:
        """Release a pinned prefix, which stays cached like any other. Raises RequestError for an unknown pin."""
        block_ids = self.block_ids.pop(pin_id, None)
        if block_ids is None or self._prefixes is None:
            raise RequestError(f"pin {pin_id} is unknown, or unpinned already")
        for block_id in reversed(block_ids):
            self._prefixes.cache.free(block_id)
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id]

    def _find(self, token_ids: Sequence[int], key: ContentKey) -> tuple[PrefixSharing, PrefixHit, HashChain]:
        if self._prefixes is None:
            raise RequestError("prefixes can be pinned only with enable_prefix_caching")
        lookup = self._prefixes.lookup
        chain = lookup.chain(token_ids, key)
        return self._prefixes, lookup.find(-1, chain, token_ids, len(token_ids)), chain

    def _num_new_blocks(self, token_ids: Sequence[int], lookup: PrefixLookup, hit: PrefixHit) -> int:
        """The number of blocks of the prefix, once it is computed, without those that are pinned already."""
        return lookup.num_kept(len(token_ids)) - sum(block_id in self for block_id in hit.device_blocks)

    def _check(self, num_new_blocks: int) -> None:
        if self.num_blocks + num_new_blocks > self.max_blocks:
            raise RequestError(
                f"pinning this prefix takes {num_new_blocks} more blocks, and {self.num_blocks} of at most "
                f"{self.max_blocks} are pinned: unpin others, or raise pinned_fraction"
            )
