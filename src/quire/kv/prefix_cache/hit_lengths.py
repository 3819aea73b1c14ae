"""How much of each waiting sequence the cache holds, without a lookup in every step."""

from quire.kv.prefix_cache.content_hash import BlockHash, HashChain


class HitLengths:
    """Remembers the lengths that lookups found, each until a block of its sequence is cached, evicted or announced.

    Owned by the BlockSpaceManager. The block trackers of all tiers call `changed`. Remembering costs nothing while no
    length is remembered, and each change costs one comparison for each sequence remembered.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[HashChain, int, int]] = {}  # seq_id -> its hashes, max_tokens, length

    def get(self, seq_id: int, max_tokens: int) -> int | None:
        """The blocks that a lookup of at most `max_tokens` tokens would find; None if only a lookup can tell."""
        known = self._known.get(seq_id)
        return known[2] if known is not None and known[1] == max_tokens else None

    def remember(self, seq_id: int, chain: HashChain, max_tokens: int, num_blocks: int) -> None:
        """A lookup found `num_blocks` blocks, none of which is still being computed, nor the one that is missing."""
        self._known[seq_id] = chain, max_tokens, num_blocks

    def forget(self, seq_id: int) -> None:
        """Remember nothing of this sequence."""
        self._known.pop(seq_id, None)

    def changed(self, index: int, block_hash: BlockHash) -> None:
        """The content of this hash, block `index` of its sequences, can be found now, or no longer."""
        if self._known:
            for seq_id in [s for s, (chain, _, _) in self._known.items() if chain.has(index, block_hash)]:
                del self._known[seq_id]
