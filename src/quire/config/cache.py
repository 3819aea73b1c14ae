"""How the KV cache is to be set up."""

from dataclasses import dataclass

from quire.common.errors import ConfigError, nearest_name

KV_CACHE_DTYPES = ("auto", "int8")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the user wants of the cache; how many blocks follow is the memory plan's to say."""

    block_size: int
    """token slots per block"""
    kv_cache_bytes: int | None
    """memory for all blocks; None: what the machine has left"""
    num_blocks_override: int | None
    """this many blocks, whatever the memory"""
    memory_utilization: float
    """share of the machine's memory (or the container's limit) that weights, activations and cache may take together"""
    enable_prefix_caching: bool
    swap_bytes: int = 0
    """memory of the host tier, for requests that are swapped out"""
    watermark: float = 0.01
    """share of blocks kept free when new requests are admitted, so that running ones can grow"""
    pinned_fraction: float = 0.25
    """share of blocks that pinned prefixes may take"""
    dtype: str = "auto"
    """what keys and values are kept in: one of KV_CACHE_DTYPES; `auto` is the model's dtype"""

    def __post_init__(self) -> None:
        if self.dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={self.dtype!r}{nearest_name(self.dtype, KV_CACHE_DTYPES)} "
                f"(allowed: {', '.join(KV_CACHE_DTYPES)})"
            )
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size={self.block_size}: must be from 1 to 1024 tokens")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.memory_utilization}: must be more than 0 and at most 1")
        if not 0 <= self.pinned_fraction < 1:
            raise ConfigError(f"pinned_fraction={self.pinned_fraction}: must be 0 or more and less than 1")
        if self.num_blocks_override is not None and self.num_blocks_override < 1:
            raise ConfigError(f"num_gpu_blocks_override={self.num_blocks_override}: must be at least 1")
