"""Which engines hold which blocks of prefixes, or will soon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quire.kv.prefix_cache.content_hash import BlockHash


class PrefixIndex:
    """For each hash of a full block, the engines in whose cache it can be found, as the engines report it.

    Blocks of requests that run are expected there too, until the request ends. There is one entry for each block that
    is cached or expected anywhere, so caches and prompts bound the memory.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        """Hash -> a bit for each engine, the engine's number being the bit's."""
        self._expected: dict[BlockHash, dict[int, int]] = {}
        """Hash -> for each engine, the number of its requests that have the block."""

    def __len__(self) -> int:
        return len(self._holders.keys() | self._expected.keys())

    def add(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """These blocks can be found in the engine's cache."""
        holders, bit = self._holders, 1 << engine
        for block_hash in hashes:
            holders[block_hash] = holders.get(block_hash, 0) | bit

    def discard(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """These blocks can no longer be found in the engine's cache."""
        holders, others = self._holders, ~(1 << engine)
        for block_hash in hashes:
            left = holders.get(block_hash, 0) & others
            if left:
                holders[block_hash] = left
            else:
                holders.pop(block_hash, None)

    def expect(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """A request with these blocks was sent to the engine; `settle` follows once."""
        expected = self._expected
        for block_hash in hashes:
            numbers = expected.get(block_hash)
            if numbers is None:
                expected[block_hash] = {engine: 1}
            else:
                numbers[engine] = numbers.get(engine, 0) + 1

    def settle(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """A request with these blocks has ended, or has left the engine."""
        expected = self._expected
        for block_hash in hashes:
            numbers = expected[block_hash]
            if numbers[engine] > 1:
                numbers[engine] -= 1
            elif len(numbers) > 1:
                del numbers[engine]
            else:
                del expected[block_hash]

    def forget(self, engine: int) -> None:
        """The engine's cache is empty."""
        self.discard(engine, list(self._holders))

    def num_blocks(self, hashes: Sequence[BlockHash], engines: Iterable[int]) -> dict[int, int]:
        """By engine, how many blocks of a sequence with these hashes it has, from the first one without a gap."""
        found = dict.fromkeys(engines, 0)
        held = self._having(hashes[0]) if hashes else 0
        if not held:  # as for most prompts
            return found
        having = sum([1 << engine for engine in found]) & held
        for index, block_hash in enumerate(hashes):
            held = self._having(block_hash)
            if having & ~held:
                for engine in _bits(having & ~held):
                    found[engine] = index
                having &= held
            if not having:
                return found
        for engine in _bits(having):
            found[engine] = len(hashes)
        return found

    def _having(self, block_hash: BlockHash) -> int:
        """A bit for each engine that has the block, or is expected to have it."""
        held = self._holders.get(block_hash, 0)
        for engine in self._expected.get(block_hash, ()):
            held |= 1 << engine
        return held


def _bits(mask: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while mask:
        last = mask & -mask
        yield last.bit_length() - 1
        mask ^= last
