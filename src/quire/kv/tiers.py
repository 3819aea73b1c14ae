"""The pools of blocks, from the device outward, and the transfers between them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.common.batch import Transfer
from quire.config.kv_cache import KVCacheConfig
from quire.kv.block_pool import BlockPool
from quire.kv.block_table import BlockTable
from quire.kv.place import DEVICE, Place
from quire.kv.prefix_cache.stats import PrefixCacheStats
from quire.kv.prefix_cache.tracker import BlockContent, EvictedHashes, OnChange


@dataclass(slots=True)
class _StepTransfers:
    """What the transfers of one step read and write outside the device tier."""

    pairs: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """By source tier and target tier, the blocks to copy."""
    held: list[Place] = field(default_factory=list)
    """Of each copy, the block further from the device. It is held until the step has been settled or reverted."""
    spilled: list[Place] = field(default_factory=list)
    """Blocks whose cached content comes with the step."""


class Tiers:
    """Owns a pool of blocks for each tier, and collects the copies between them while a step is planned.

    Within a step all copies away from the device run before all copies towards it, those between the furthest tiers
    first. So a block that a copy reads or writes outside the device tier is held until the step has been settled. A
    cached block that is evicted from one tier is kept in the next one while there is room.
    """

    def __init__(self, config: KVCacheConfig, stats: PrefixCacheStats, on_change: OnChange) -> None:
        self.pools = [
            BlockPool(size, len(config.groups), partial(self._evicted, tier), on_change, tier)
            for tier, size in enumerate((config.num_blocks, config.num_host_blocks))
        ]
        """By tier, from the device outward."""
        self.evicted = EvictedHashes()
        self.journal: list[tuple[str, int]] | None = None
        """("evicted" or "spilled", block of the device tier), in order, while a view is open; the view empties it."""
        self._stats = stats
        self._has_further = config.num_host_blocks > 0
        self._planned = _StepTransfers()
        self._in_flight: dict[int, _StepTransfers] = {}  # by step

    def move(self, tables: Sequence[BlockTable], source: int, target: int) -> None:
        """Exchange the tables' blocks, of one tier, for blocks of another, shared ones once."""
        moved: dict[int, int] = {}
        for table in tables:
            for index, block_id in enumerate(table.ids(), start=table.first):
                if block_id in moved:
                    self.pools[target].share(moved[block_id])
                else:
                    moved[block_id] = new = self.pools[target].allocate()
                    self._copy(Place(source, block_id), Place(target, new))
                table.replace(index, moved[block_id])
                self.pools[source].free(block_id)

    def bring(self, place: Place) -> int:
        """The device block of a place, or a new one with its content; the caller's hold passes to that block."""
        if place.tier == DEVICE:
            return place.block_id
        block_id = self.pools[DEVICE].allocate()
        self._copy(place, Place(DEVICE, block_id))
        self.pools[place.tier].free(place.block_id)
        return block_id

    def _copy(self, source: Place, target: Place) -> None:
        """Plan a copy, and hold its block that is further from the device."""
        further = max(source, target)
        self.pools[further.tier].share(further.block_id)
        self._planned.held.append(further)
        pairs = self._planned.pairs.setdefault((source.tier, target.tier), [])
        pairs.append((source.block_id, target.block_id))

    def take_transfers(self, step: int) -> tuple[Transfer, ...]:
        """The transfers that this step must do, in order, before it computes anything."""
        planned, self._planned = self._planned, _StepTransfers()
        self._in_flight[step] = planned
        pairs = planned.pairs
        if not pairs:  # as in most steps
            return ()
        keys = sorted(pairs, key=lambda key: (key[0] < key[1], key), reverse=True)
        return tuple([Transfer(source, target, tuple(pairs[source, target])) for source, target in keys])

    def settle(self, step: int) -> None:
        """The step has succeeded: its transfers are done."""
        transfers = self._in_flight.pop(step)
        if transfers.held:
            self._release(transfers)

    def revert(self, step: int) -> None:
        """The step has failed: content that it was to spill may not be there. What is planned now, after it or for it,
        is dropped as well."""
        planned, self._planned = self._planned, _StepTransfers()
        for transfers in (self._in_flight.pop(step, _StepTransfers()), planned):
            for tier, block_id in transfers.spilled:
                self._lost(self.pools[tier].tracker[block_id])
                self.pools[tier].forget(block_id)
            self._release(transfers)

    def _release(self, transfers: _StepTransfers) -> None:
        for tier, block_id in transfers.held:
            self.pools[tier].free(block_id)

    def advance(self, step: int) -> None:
        """Blocks released from here on count as used in this step."""
        for pool in self.pools:
            pool.step = step

    def holds(self, tier: int) -> Counter[int]:
        """The blocks of a tier that transfers hold, and how often."""
        steps = (*self._in_flight.values(), self._planned)
        return Counter(place.block_id for transfers in steps for place in transfers.held if place.tier == tier)

    def _evicted(self, tier: int, block_id: int, content: BlockContent) -> None:
        """A cached block of this tier is given out: keep its content in the next tier, if there is room."""
        if self._has_further and self._keep(tier, block_id, content):
            return
        self._note("evicted", tier, block_id)
        if not self._has_further or not self._is_elsewhere(tier, content):
            self._lost(content)

    def _keep(self, tier: int, block_id: int, content: BlockContent) -> bool:
        """Keep the content of a block of this tier in the next one. Returns whether that is possible."""
        if content.block_hash is None or tier + 1 == len(self.pools):
            return False
        further = self.pools[tier + 1]
        known = further.tracker.find(content.group, content.block_hash, content.tokens)
        if known is not None:
            further.acquire(known.block_id)  # it counts as used now
            further.free(known.block_id)
            return True
        if not further.num_free_blocks:
            return False
        self._spill(Place(tier, block_id), content)
        return True

    def _is_elsewhere(self, tier: int, content: BlockContent) -> bool:
        """Whether a block of another tier has this content."""
        block_hash, others = content.block_hash, [pool for other, pool in enumerate(self.pools) if other != tier]
        return block_hash is not None and any(
            pool.tracker.find(content.group, block_hash, content.tokens) is not None for pool in others
        )

    def _spill(self, source: Place, content: BlockContent) -> None:
        further = self.pools[source.tier + 1]
        target = Place(source.tier + 1, further.allocate())
        self._planned.spilled.append(target)  # before it can be found, however this ends
        further.tracker.add(target.block_id, content)
        self._copy(source, target)
        further.free(target.block_id)  # the copy holds it
        self._stats.num_spilled_tokens += content.num_tokens
        self._note("spilled", *source)

    def _note(self, event: str, tier: int, block_id: int) -> None:
        if self.journal is not None and tier == DEVICE:
            self.journal.append((event, block_id))

    def _lost(self, content: BlockContent) -> None:
        self._stats.num_evicted_tokens += content.num_tokens
        if content.block_hash is not None and self.evicted.most:
            self.evicted.add(content.block_hash)
