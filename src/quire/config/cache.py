"""Configuration of the KV cache."""

from dataclasses import dataclass

from quire.common.errors import ConfigError, check_choice

KV_CACHE_DTYPES = ("auto", "int8")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The user's settings of the KV cache. The memory plan computes the number of blocks from them."""

    block_size: int
    """Token slots per block."""
    kv_cache_bytes: int | None
    """Memory for all blocks; None for the memory that the machine has left."""
    num_blocks_override: int | None
    """Number of blocks regardless of the memory; None to compute it."""
    memory_utilization: float
    """Share of the machine's memory (or the container's limit) for weights, activations and cache together."""
    enable_prefix_caching: bool
    swap_bytes: int = 0
    """Memory of the host tier, for requests that are swapped out and for cached blocks that are evicted."""
    memory_limit_bytes: int | None = None
    """Most memory for weights, activations, cache and host tier together; None for what the machine allows."""
    watermark: float = 0.01
    """Share of blocks that admitting new requests leaves free, so that running requests can grow."""
    pinned_fraction: float = 0.25
    """Largest share of blocks that pinned prefixes may use."""
    dtype: str = "auto"
    """Type of stored keys and values, one of KV_CACHE_DTYPES; `auto` is the model's dtype."""

    def __post_init__(self) -> None:
        check_choice("kv_cache_dtype", self.dtype, KV_CACHE_DTYPES)
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size={self.block_size}: must be from 1 to 1024 tokens")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.memory_utilization}: must be more than 0 and at most 1")
        if not 0 <= self.pinned_fraction < 1:
            raise ConfigError(f"pinned_fraction={self.pinned_fraction}: must be 0 or more and less than 1")
        if self.num_blocks_override is not None and self.num_blocks_override < 1:
            raise ConfigError(f"num_gpu_blocks_override={self.num_blocks_override}: must be at least 1")
