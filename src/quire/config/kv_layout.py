"""Derives the groups and the number of blocks of the whole KV cache from the needs of each attention layer."""

import dataclasses
from collections.abc import Sequence

from quire.common.errors import ConfigError, OutOfMemoryError
from quire.config.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, NoCacheSpec
from quire.config.machine import format_bytes
from quire.config.parallel import Range


def group_layers(specs: Sequence[KVCacheSpec], block_size: int) -> tuple[KVCacheGroup, ...]:
    """Split layers into groups of equal spec that use nearly equal numbers of bytes of a block.

    That number is the smallest total of the layers of one spec, but not less than the bytes of any single layer. So a
    model of 12 full and 12 sliding-window layers gets two groups of 12 layers; one of 4 full and 20 sliding-window
    layers gets six groups of 4; one of 12 layers and 12 others of twice the bytes gets a group of 12 and two groups
    of 6.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer_id, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer_id)
    sizes = {spec: spec.block_bytes(block_size) for spec in by_spec}
    least = min((sizes[spec] * len(layer_ids) for spec, layer_ids in by_spec.items() if sizes[spec]), default=0)
    block_bytes = max(least, *sizes.values())
    lengths = {spec: block_bytes // sizes[spec] if sizes[spec] else len(specs) for spec in by_spec}
    return tuple(
        KVCacheGroup(tuple(layer_ids[start : start + lengths[spec]]), spec)
        for spec, layer_ids in by_spec.items()
        for start in range(0, len(layer_ids), lengths[spec])
    )


def with_draft_layers(groups: Sequence[KVCacheGroup], specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """The groups, the first that keeps every token which these layers of a draft model need with their parts in its
    blocks: so what happens to a block happens to both models' keys and values. Raises ConfigError if there is none.
    """
    needed = max([_num_kept(spec) for spec in specs])
    for index, group in enumerate(groups):
        if _num_kept(group.spec) >= needed and not any(isinstance(spec, NoCacheSpec) for spec in (group.spec, *specs)):
            return (*groups[:index], dataclasses.replace(group, draft_specs=tuple(specs)), *groups[index + 1 :])
    layer_id, kept = [_num_kept(spec) for spec in specs].index(needed), max(_num_kept(group.spec) for group in groups)
    seen = "all" if needed == float("inf") else f"{needed:.0f}"
    raise ConfigError(
        f"speculative_config: layer {layer_id} of the draft model or head sees {seen} tokens, but the layers of the "
        f"model keep at most {kept:.0f}; choose another draft model or head"
    )


def _num_kept(spec: KVCacheSpec) -> float:
    """The most tokens before a token that such a layer sees, and keeps."""
    return 0.0 if isinstance(spec, NoCacheSpec) else float(getattr(spec, "sliding_window", "inf"))


def kv_cache_config(
    specs: Sequence[KVCacheSpec],
    block_size: int,
    *,
    draft_specs: Sequence[KVCacheSpec] = (),
    num_bytes: int | None = None,
    num_blocks: int = 0,
    host_bytes: int = 0,
    max_chunk: int | None = None,
    num_ranks: int = 1,
    num_machines: int = 1,
    stages: tuple[Range, ...] = (),
) -> KVCacheConfig:
    """The cache that fits into `num_bytes` of all ranks and `stages` of this machine, or of exactly `num_blocks`, with
    the layers of a draft model, too. OutOfMemoryError if no block fits."""
    groups = group_layers(specs, block_size)
    if draft_specs:
        groups = with_draft_layers(groups, draft_specs)
    config = KVCacheConfig(
        block_size,
        num_blocks,
        groups,
        max_chunk=max_chunk,
        num_ranks=num_ranks,
        num_machines=num_machines,
        stages=stages,
    )
    block_bytes, num_needed = config.block_bytes, config.blocks_to_hold(1)
    if num_bytes is not None:
        config = dataclasses.replace(config, num_blocks=num_bytes // block_bytes if block_bytes else 0)
    if config.num_blocks < num_needed:
        have = f"{num_blocks} blocks are" if num_bytes is None else f"{format_bytes(max(0, num_bytes))} is"
        raise OutOfMemoryError(
            f"{have} too little for the KV cache: {num_needed} block(s) of {block_size} tokens take "
            f"{format_bytes(block_bytes * num_needed)}. Raise what limits it (kv_cache_memory, "
            "num_gpu_blocks_override, memory_limit, gpu_memory_utilization), or lower block_size"
        )
    return dataclasses.replace(config, num_host_blocks=host_bytes // block_bytes if block_bytes else 0)
