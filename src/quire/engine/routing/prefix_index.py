"""Which engines hold which blocks of prefixes, or will soon."""

from collections.abc import Iterable, Sequence

from quire.kv.prefix_cache.content_hash import BlockHash


class PrefixIndex:
    """For each hash of a full block, the engines in whose cache it can be found, as the engines report it.

    Blocks of requests that run are expected there too, until the request ends. There is one entry for each block that
    is cached or expected anywhere, so caches and prompts bound the memory.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        """Hash -> a bit for each engine, the engine's number being the bit's."""
        self._expected: dict[BlockHash, int] = {}
        """Hash -> a bit for each engine with requests that have the block."""
        self._further: dict[tuple[int, BlockHash], int] = {}
        """For an engine and a hash, the number of its requests that have the block, less one; no zeros."""

    def __len__(self) -> int:
        return len(self._holders.keys() | self._expected.keys())

    def add(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """These blocks can be found in the engine's cache."""
        holders, bit = self._holders, 1 << engine
        for block_hash in hashes:
            held = holders.get(block_hash)
            holders[block_hash] = held | bit if held else bit

    def discard(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """These blocks can no longer be found in the engine's cache."""
        holders, others = self._holders, ~(1 << engine)
        for block_hash in hashes:
            left = holders.pop(block_hash, 0) & others
            if left:
                holders[block_hash] = left

    def expect(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """A request with these blocks was sent to the engine; `settle` follows once."""
        expected, further, bit = self._expected, self._further, 1 << engine
        for block_hash in hashes:
            held = expected.get(block_hash)
            if held is None:
                expected[block_hash] = bit
            elif held & bit:
                further[engine, block_hash] = further.get((engine, block_hash), 0) + 1
            else:
                expected[block_hash] = held | bit

    def settle(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """A request with these blocks has ended, or has left the engine."""
        expected, further, bit = self._expected, self._further, 1 << engine
        for block_hash in hashes:
            number = further.pop((engine, block_hash), 0)
            if number > 1:
                further[engine, block_hash] = number - 1
            elif not number:
                held = expected[block_hash]
                if held == bit:
                    del expected[block_hash]
                else:
                    expected[block_hash] = held & ~bit

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
        return self._holders.get(block_hash, 0) | self._expected.get(block_hash, 0)


def _bits(mask: int) -> list[int]:
    """Return the places of the bits that are set."""
    return [place for place, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]
