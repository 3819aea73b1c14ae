"""The tokens in blocks of the cache, read only when a client asks for them. This module does not import torch."""

from array import array
from collections.abc import Sequence

from quire.engine.view.cache_view import Watched


def block_tokens(engine: Watched, tier: int, block_ids: Sequence[int]) -> list[list[int]]:
    """Return the computed tokens in each of these blocks; none for a block that is free or does not exist."""
    pools = engine.blocks.tiers.pools
    if not 0 <= tier < len(pools):
        return [[] for _ in block_ids]
    tokens: dict[int, list[int]] = {block_id: [] for block_id in block_ids}
    unknown = set()
    for block_id in tokens:
        content = pools[tier].tracker.get(block_id)
        if content is not None:
            tokens[block_id] = array("q", content.tokens).tolist()
        elif 0 <= block_id < pools[tier].num_blocks and pools[tier].ref_counts[block_id] > 0:
            unknown.add(block_id)
    if unknown:  # blocks that are being filled, or that the prefix cache does not keep
        tokens |= _tokens_of_sequences(engine, tier, unknown)
    return [tokens[block_id] for block_id in block_ids]


def _tokens_of_sequences(engine: Watched, tier: int, block_ids: set[int]) -> dict[int, list[int]]:
    """Return the tokens that sequences have computed in these blocks."""
    found: dict[int, list[int]] = {}
    size = engine.blocks.block_size
    for seq_id, place, tables in engine.blocks.holdings():
        if place != tier:
            continue
        _, seq = engine.scheduler.requests.owners[seq_id]
        for table in tables:
            for index, block_id in enumerate(table.snapshot().tolist()):
                if index >= table.first and block_id in block_ids:
                    end = min((index + 1) * size, seq.num_computed_tokens)
                    computed = list(seq.token_ids[index * size : end])
                    found[block_id] = max(found.get(block_id, []), computed, key=len)
    return found
