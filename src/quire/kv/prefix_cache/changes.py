"""Which full blocks can be found in the cache, for a router that chooses among several engines."""

from collections.abc import Sequence

from quire.kv.prefix_cache.content_hash import BlockHash
from quire.kv.prefix_cache.tracker import BlockTracker


class PrefixChanges:
    """Collects the hashes of a group's full blocks that can be found now, or no longer, in any tier."""

    def __init__(self, trackers: Sequence[BlockTracker], group: int) -> None:
        """Collect from now on; `trackers` are those of all tiers, and `group` is one that keeps all tokens, where the
        model has such layers."""
        self._trackers, self._group = trackers, group
        self._changed: set[BlockHash] = set()
        self._known: set[BlockHash] = set()
        for tracker in trackers:
            tracker.changed_hashes = self._changed

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return the hashes that can be found since the last call, and those that no longer can."""
        found: list[BlockHash] = []
        gone: list[BlockHash] = []
        if not self._changed:
            return found, gone
        group, known, (device, *others) = self._group, self._known, self._trackers
        for block_hash in self._changed:
            is_found = device.has(group, block_hash) or any(tracker.has(group, block_hash) for tracker in others)
            if is_found != (block_hash in known):
                (found if is_found else gone).append(block_hash)
        self._known.update(found)
        self._known.difference_update(gone)
        self._changed.clear()
        return found, gone
