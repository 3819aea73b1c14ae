"""What the KV cache of one model looks like: per layer (spec), per set of layers (group), in all (config)."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps per token. Layers of equal spec can share a block table."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    """`float32` or `bfloat16`"""
    sliding_window: int | None = None
    """a token sees this many positions, itself included; None sees all"""

    @property
    def bytes_per_token(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table. Layer `layer_ids[i]` lives in tensor i of the KVCacheConfig."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The tensors to allocate: `num_tensors` flat ones of `num_blocks * block_bytes` bytes, shared by all groups.

    A block id is good in every tensor, and belongs to one group at a time: group g's layer i uses tensor i.
    """

    block_size: int
    num_blocks: int
    num_tensors: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0
    """blocks of the host tier, which swapped-out requests wait in; each tensor has a twin of as many"""

    @property
    def block_bytes(self) -> int:
        """One block in one tensor; the same for every group."""
        return self.block_size * self.groups[0].spec.bytes_per_token

    @property
    def total_bytes(self) -> int:
        """All tensors of the device tier together."""
        return self.num_tensors * self.num_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """All tensors of the host tier together."""
        return self.num_tensors * self.num_host_blocks * self.block_bytes

    @property
    def max_tokens(self) -> int:
        """Tokens one sequence alone could keep, with a block table in every group."""
        return self.num_blocks // len(self.groups) * self.block_size
