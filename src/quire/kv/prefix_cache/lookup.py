"""The longest prefix of a sequence that need not be computed, and why it is not longer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from quire.config.kv_cache import KVCacheConfig
from quire.kv.managers.base import GroupManager
from quire.kv.place import DEVICE, Place
from quire.kv.prefix_cache.content_hash import BlockHash, ContentHasher, ContentKey, HashChain
from quire.kv.prefix_cache.stats import HitSource, MissReason
from quire.kv.prefix_cache.tracker import BlockTracker, EvictedHashes

SOURCES = (HitSource.DEVICE, HitSource.HOST)
"""By tier, the name under which a hit there is counted."""

_NONE_FOUND = dict.fromkeys(HitSource, 0)

Join = Callable[[int, int, int], Place | None]
"""(sequence, group, block index) -> the block, if it will be computed in the step being planned."""


class PrefixHit(msgspec.Struct, frozen=True):
    """What a lookup found for a sequence. It is valid until blocks are next allocated or freed."""

    seq_id: int
    token_ids: Sequence[int]
    max_tokens: int
    """The number of tokens that were looked up."""
    num_blocks: int = 0
    """The number of whole blocks found."""
    num_ready_blocks: int = 0
    """The number of these, at the beginning, that are computed and in the device tier already."""
    first: tuple[int, ...] = ()
    """By group, the first block that the group's window still needs."""
    places: tuple[list[Place], ...] = ()
    """By group, the places of its blocks from `first` on."""
    num_by_source: dict[HitSource, int] | None = None
    is_settled: bool = True
    """Whether its length stays valid until content is cached, evicted or announced: no block that decided it is being
    computed."""
    is_awaited: bool = False
    """Whether the next block is being computed by another sequence, so that a later lookup will find more."""

    @property
    def device_blocks(self) -> list[int]:
        """Those of its blocks that are in the device tier."""
        return [place.block_id for places in self.places for place in places if place.tier == DEVICE]

    @property
    def needs_step(self) -> bool:
        """Whether the prefix will be complete only after the coming step."""
        return self.num_ready_blocks < self.num_blocks


class PrefixLookup:
    """Finds blocks in the device tier, in sequences that are computing them, in the host tier. Changes nothing."""

    def __init__(
        self,
        config: KVCacheConfig,
        managers: Sequence[GroupManager],
        trackers: Sequence[BlockTracker],
        evicted: EvictedHashes,
        join: Join,
    ) -> None:
        self._config = config
        self._managers = managers
        self._closed = [group for group, manager in enumerate(managers) if manager.is_prefix_closed]
        self._open = [group for group, manager in enumerate(managers) if not manager.is_prefix_closed]
        self.hasher = ContentHasher()
        self._device, *others = trackers
        self._further = list(zip(SOURCES[1:], others, strict=True))  # the other tiers, from the device outward
        self._evicted = evicted
        self._join = join
        self.computing: dict[BlockHash, int] = {}
        """By hash, the sequence that is to compute a full block. PrefixSharing keeps it up to date."""

    def chain(self, token_ids: Sequence[int], key: ContentKey) -> HashChain:
        """A new sequence's hash chain, with all full blocks hashed."""
        chain = HashChain(self.hasher, self._config.block_size, key)
        chain.extend(len(token_ids) // self._config.block_size, token_ids)
        return chain

    def find(self, seq_id: int, chain: HashChain, token_ids: Sequence[int], max_tokens: int) -> PrefixHit:
        """The longest prefix of whole blocks within `max_tokens` tokens that every group accepts.

        All full blocks of those tokens are hashed in `chain`.
        """
        max_blocks = max_tokens // self._config.block_size
        search = _Search(chain, [{} for _ in self._managers])
        num_blocks = max_blocks
        for group in self._closed:
            num_blocks = self._managers[group].longest_prefix(num_blocks, partial(self._run, search, group))
        num_before = num_blocks + 1
        while num_blocks < num_before:  # one group's prefix may be too short for another
            num_before = num_blocks
            for group in self._open:
                num_blocks = self._managers[group].longest_prefix(num_blocks, partial(self._run, search, group))
        first = self.first_needed(num_blocks)
        unready = {index: source for index, source in search.unready.items() if index < num_blocks}
        num_by_source = {**_NONE_FOUND, HitSource.DEVICE: num_blocks - len(unready)}
        for source in unready.values():
            num_by_source[source] += 1
        return PrefixHit(
            seq_id,
            token_ids,
            max_tokens,
            num_blocks,
            num_ready_blocks=min(unready, default=num_blocks),
            first=first,
            places=tuple(
                [places[i] for i in range(start, num_blocks)] if manager.holds_tokens else []
                for manager, places, start in zip(self._managers, search.places, first, strict=True)
            ),
            num_by_source=num_by_source,
            is_settled=search.is_settled,
            is_awaited=num_blocks < max_blocks and chain.block(num_blocks)[0] in self.computing,
        )

    def _run(self, search: "_Search", group: int, indices: range) -> int:
        """Find the blocks of `indices` one after another until one is missing; returns how many there are."""
        find, chain, places = self._device.find, search.chain, search.places[group]
        for count, index in enumerate(indices):
            block_hash, tokens = chain.block(index)
            place = find(group, block_hash, tokens)
            if place is None:
                owner = self.computing.get(block_hash)
                if owner is not None:
                    search.is_settled = False
                    place, source = self._join(owner, group, index), HitSource.JOINED
                else:
                    place, source = self._find_further(group, block_hash, tokens)
                if place is None:
                    return count
                search.unready[index] = source
            places[index] = place
        return len(indices)

    def _find_further(self, group: int, block_hash: BlockHash, tokens: bytes) -> tuple[Place | None, HitSource]:
        """The block of this hash in the nearest tier, other than the device's, that has one."""
        for source, tracker in self._further:
            place = tracker.find(group, block_hash, tokens)
            if place is not None:
                return place, source
        return None, HitSource.HOST

    def first_needed(self, num_blocks: int) -> tuple[int, ...]:
        """By group, the first block that the token behind `num_blocks` blocks still reads."""
        num_tokens = num_blocks * self._config.block_size
        return tuple([manager.first_needed(num_tokens) for manager in self._managers])

    def num_kept(self, num_tokens: int) -> int:
        """Blocks, in all groups together, that a sequence of `num_tokens` computed tokens still needs."""
        first = self.first_needed(num_tokens // self._config.block_size)
        kept = zip(self._managers, first, strict=True)
        return sum(manager.num_blocks(num_tokens) - start for manager, start in kept)

    def find_tails(self, chain: HashChain, index: int, wanted: bytes) -> list[tuple[int, int, int]]:
        """For every group that holds tokens: its number, the block behind `index` blocks that begins with the most of
        `wanted`, and how many tokens that is. An empty list if a group has no such block."""
        tails = []
        for group, manager in enumerate(self._managers):
            if manager.holds_tokens:
                found = self._device.find_tail(group, chain.parent(index), wanted)
                if found is None:
                    return []
                tails.append((group, *found))
        return tails

    def explain(self, chain: HashChain, num_cached: int, num_tokens: int) -> dict[MissReason, int]:
        """Why the tokens from num_cached to num_tokens were not found. `chain` has all full blocks of them."""
        size = self._config.block_size
        num_full = num_tokens // size
        num_elsewhere = self._num_under_other_key(chain, num_full)
        reasons = dict.fromkeys(MissReason, 0)
        reason = MissReason.NEVER_SEEN  # of a partly full block: as of the one before it
        for index in range(num_cached // size, -(-num_tokens // size)):
            if index < num_full:
                block_hash = chain.block(index)[0]
                reason = MissReason.NEVER_SEEN
                if index < num_elsewhere:
                    reason = MissReason.OTHER_KEY
                elif block_hash in self._evicted:
                    reason = MissReason.EVICTED
                elif block_hash in self.computing:
                    reason = MissReason.NOT_COMPUTED
            reasons[reason] += min((index + 1) * size, num_tokens) - max(index * size, num_cached)
        return reasons

    def _num_under_other_key(self, chain: HashChain, num_full: int) -> int:
        """Leading full blocks of the same tokens that are cached under another LoRA id and the same salt."""
        if num_full == 0:
            return 0
        count = 0
        parent = self._device.other_root(chain.parent(0), chain.key.cache_salt, chain.block(0)[1])
        while parent is not None and count < num_full:
            tokens = chain.block(count)[1]
            parent = self.hasher.child(parent, tokens)
            if self._device.find(0, parent, tokens) is None:
                break
            count += 1
        return count


@dataclass(slots=True)
class _Search:
    """The state of one lookup."""

    chain: HashChain
    places: list[dict[int, Place]]
    """By group and block index, the places of the blocks found."""
    unready: dict[int, HitSource] = field(default_factory=dict)
    """By block index, the sources of blocks that are not in the device tier yet."""
    is_settled: bool = True
    """Whether no block that was looked up is being computed."""
