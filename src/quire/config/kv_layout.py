"""From what each attention layer needs to the tensors, groups and number of blocks of the whole cache."""

from collections.abc import Sequence

from quire.common.errors import ConfigError, OutOfMemoryError
from quire.config.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from quire.config.sizes import format_bytes


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Split layers into groups of equal spec and nearly equal length, so that the groups can share tensors.

    The length is that of the rarest spec's layers: a model of 12 full and 12 sliding-window layers gets two groups over
    12 tensors, one of 4 full and 20 sliding-window layers six groups over 4 tensors. Layers need equal bytes per token.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer_id, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer_id)
    sizes = {spec.bytes_per_token for spec in by_spec}
    if len(sizes) > 1:
        raise ConfigError(f"layers that need {sorted(sizes)} bytes per token cannot share one pool of blocks")
    length = min(len(layer_ids) for layer_ids in by_spec.values())
    return tuple(
        KVCacheGroup(tuple(layer_ids[start : start + length]), spec)
        for spec, layer_ids in by_spec.items()
        for start in range(0, len(layer_ids), length)
    )


def kv_cache_config(
    specs: Sequence[KVCacheSpec],
    block_size: int,
    *,
    num_bytes: int | None = None,
    num_blocks: int | None = None,
    host_bytes: int = 0,
    max_chunk: int | None = None,
) -> KVCacheConfig:
    """The cache that fits into `num_bytes`, or of exactly `num_blocks`. OutOfMemoryError if no block fits."""
    groups = group_layers(specs)
    num_tensors = max(len(group.layer_ids) for group in groups)
    one_block = num_tensors * block_size * groups[0].spec.bytes_per_token
    if num_blocks is None:
        num_blocks = max(0, (num_bytes or 0) // one_block)
    if num_blocks < len(groups):
        have = f"{num_blocks} blocks are" if num_bytes is None else f"{format_bytes(max(0, num_bytes))} is"
        raise OutOfMemoryError(
            f"{have} too little for the KV cache: {len(groups)} block(s) of {block_size} tokens take "
            f"{format_bytes(one_block * len(groups))}. Give kv_cache_memory, a smaller block_size, or more memory"
        )
    return KVCacheConfig(block_size, num_blocks, num_tensors, groups, host_bytes // one_block, max_chunk)
