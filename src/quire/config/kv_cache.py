"""What the KV cache of one model looks like: per layer (spec), per set of layers (group), in all (config)."""

from bisect import bisect_right
from dataclasses import dataclass

MAX_BLOCKS_PER_SEQ = 2**26
"""longer than any sequence"""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps per token. Layers of equal spec can share a block table."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    """`float32`, `bfloat16`, or `int8` with a float32 scale for each key and each value of a head"""
    sliding_window: int | None = None
    """a token sees this many positions, itself included; None sees all"""

    @property
    def bytes_per_token(self) -> int:
        """Key and value of one token in one layer."""
        head_bytes = self.head_dim + 4 if self.dtype == "int8" else self.head_dim * DTYPE_BYTES[self.dtype]
        return 2 * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table. Layer `layer_ids[i]` lives in tensor i of the KVCacheConfig."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The memory to allocate: `num_blocks` blocks of `num_tensors` parts of `block_bytes`, shared by all groups.

    A block id belongs to one group at a time: group g's layer i uses part i of it.
    """

    block_size: int
    num_blocks: int
    num_tensors: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0
    """blocks of the host tier, for swapped-out requests and spilled content"""
    max_chunk: int | None = None
    """tokens of one sequence computed in one step, at most; bounds what a group with a window holds at once"""

    @property
    def block_bytes(self) -> int:
        """One part of a block: what it holds for one layer; the same for every group."""
        return self.block_size * self.groups[0].spec.bytes_per_token

    @property
    def total_bytes(self) -> int:
        """The whole device tier."""
        return self.num_tensors * self.num_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """The whole host tier."""
        return self.num_tensors * self.num_host_blocks * self.block_bytes

    def blocks_to_hold(self, num_tokens: int) -> int:
        """Blocks, in all groups together, that a sequence may hold at once on its way to `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(min(num_blocks, self._max_blocks(group)) for group in self.groups)

    def _max_blocks(self, group: KVCacheGroup) -> int:
        """What the window and a chunk cover, up to one block at either end, and one that is let go a little later."""
        window = group.spec.sliding_window
        if window is None or self.max_chunk is None:
            return MAX_BLOCKS_PER_SEQ
        return (window - 1 + self.max_chunk) // self.block_size + 3

    @property
    def is_length_bounded(self) -> bool:
        """Whether the number of blocks limits how long a sequence may be; False if every layer forgets old tokens."""
        return self.max_tokens < MAX_BLOCKS_PER_SEQ * self.block_size

    @property
    def max_tokens(self) -> int:
        """Tokens one sequence alone could keep, with a block table in every group."""
        counts = range(MAX_BLOCKS_PER_SEQ + 1)
        fits = bisect_right(counts, self.num_blocks, key=lambda n: self.blocks_to_hold(n * self.block_size))
        return (fits - 1) * self.block_size
