"""Which full blocks can be found in the cache, for a router that chooses among several engines."""

from collections.abc import Sequence

from quire.kv.prefix_cache.content_hash import BlockHash
from quire.kv.prefix_cache.tracker import BlockTracker


class PrefixChanges:
    """Collects the hashes of a group's full blocks that can be found now, or no longer, in any tier."""

    def __init__(self, trackers: Sequence[BlockTracker], group: int) -> None:
        """Collect from now on; `trackers` are those of all tiers, and `group` is one that keeps all tokens, where the
        model has such layers."""
        self._hashes = [tracker.hashes(group) for tracker in trackers]
        """By tier, what can be found there."""
        self._changed: list[BlockHash] = []
        self._known: set[BlockHash] = set()
        for tracker in trackers:
            tracker.changed_hashes = self._changed

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return the hashes that can be found since the last call, and those that no longer can."""
        found: list[BlockHash] = []
        gone: list[BlockHash] = []
        if not self._changed:
            return found, gone
        known, (device, *others) = self._known, self._hashes
        for block_hash in self._changed:
            if block_hash in device or (others and any(block_hash in hashes for hashes in others)):
                if block_hash not in known:
                    known.add(block_hash)
                    found.append(block_hash)
            elif block_hash in known:
                known.remove(block_hash)
                gone.append(block_hash)
        self._changed.clear()
        return found, gone
