"""The layout of a model's KV cache: of a layer (spec), of layers that share block tables (group), of all (config)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass

from quire.common.errors import ConfigError
from quire.config.parallel import Range, Shard, key_heads

MAX_BLOCKS_PER_SEQ = 2**26
"""Largest number of blocks of a sequence; no sequence has as many."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_BLOCK_ALIGNMENT = 8  # bytes: elements of any dtype start at a multiple of their size in every block


class KVCacheSpec(ABC):
    """The state that one layer keeps for a sequence. Layers of equal spec can share a block table.

    A new kind is a subclass, and a manager of its groups in `quire.kv.managers`. A layer that keeps nothing has blocks
    of 0 bytes and holds none; a state of constant size is one block of that size.
    """

    __slots__ = ()

    @abstractmethod
    def block_bytes(self, block_size: int) -> int:
        """The bytes of one layer in one block."""

    @abstractmethod
    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int | None) -> int:
        """The most blocks that a sequence holds at once in a group of such layers, on its way to `num_tokens` tokens,
        where a step computes at most `max_chunk` of them (None: any number)."""

    def with_dtype(self, dtype: str) -> KVCacheSpec:
        """The spec of the same layer with keys and values in `dtype`. Raises ConfigError if it cannot have that."""
        return self

    def of_rank(self, shard: Shard) -> KVCacheSpec:
        """What one of the ranks that share the layer keeps: here all of it."""
        return self


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of each token. Abstract: a subclass says which tokens are kept."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    """`float32`, `bfloat16`, or `int8` with a float32 scale for each key and each value of a head."""

    @property
    def bytes_per_token(self) -> int:
        """Key and value of one token in one layer."""
        head_bytes = self.head_dim + 4 if self.dtype == "int8" else self.head_dim * DTYPE_BYTES[self.dtype]
        return 2 * self.num_kv_heads * head_bytes

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    def with_dtype(self, dtype: str) -> AttentionSpec:
        if self.head_dim % 4:
            raise ConfigError(
                f"kv_cache_dtype={dtype!r}: this model's heads have {self.head_dim} dimensions, which must be a "
                "multiple of 4; leave it at auto"
            )
        return dataclasses.replace(self, dtype=dtype)

    def of_rank(self, shard: Shard) -> AttentionSpec:
        first, end = key_heads(self.num_kv_heads, shard)
        return dataclasses.replace(self, num_kv_heads=end - first)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """A token sees all tokens before it, and all are kept."""

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int | None) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class LatentSpec(KVCacheSpec):
    """Of each token one row, which the keys and values of all heads are made of (DeepSeek-AI 2024, "DeepSeek-V2")."""

    rank: int
    """The width of the latent."""
    rotary_dim: int
    """The width of the part of the keys that is rotated, and that all heads share."""
    dtype: str
    """`float32` or `bfloat16`."""

    @property
    def width(self) -> int:
        """Of a row: the latent, and the rotated part behind it."""
        return self.rank + self.rotary_dim

    @property
    def bytes_per_token(self) -> int:
        """A row of one layer."""
        return self.width * DTYPE_BYTES[self.dtype]

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int | None) -> int:
        return -(-num_tokens // block_size)

    def with_dtype(self, dtype: str) -> LatentSpec:
        if dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"kv_cache_dtype={dtype!r}: this model keeps one latent for all heads of a token, which takes no dtype "
                f"but {' and '.join(DTYPE_BYTES)}; leave it at auto"
            )
        return dataclasses.replace(self, dtype=dtype)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """A token sees at most the last `sliding_window` tokens, itself included, and older ones are not kept.

    Attention to chunks of a size has the spec of a window of that size: its tokens see no more, and often less.
    """

    sliding_window: int

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int | None) -> int:
        """The blocks of the window and of a chunk, a partly used block at either end, and one that is freed later."""
        num_blocks = -(-num_tokens // block_size)
        if max_chunk is None:
            return num_blocks
        return min(num_blocks, (self.sliding_window - 1 + max_chunk) // block_size + 3)


@dataclass(frozen=True, slots=True)
class NoCacheSpec(KVCacheSpec):
    """Nothing is kept: all tokens of a sequence run in one step, and read each other there."""

    def block_bytes(self, block_size: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int | None) -> int:
        return 0


def attention_spec(num_kv_heads: int, head_dim: int, dtype: str, sliding_window: int | None = None) -> AttentionSpec:
    """The spec of an attention layer with a sliding window, or chunks of that size, or without either (None)."""
    if sliding_window is None:
        return FullAttentionSpec(num_kv_heads, head_dim, dtype)
    return SlidingWindowSpec(num_kv_heads, head_dim, dtype, sliding_window)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of equal spec that share one block table. A block contains their parts in this order."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec
    draft_specs: tuple[KVCacheSpec, ...] = ()
    """Of all layers of a draft model, if their parts lie in this group's blocks, behind those of its own layers."""

    def block_bytes(self, block_size: int) -> int:
        """The bytes that the group's layers use of a block."""
        of_draft = sum([spec.block_bytes(block_size) for spec in self.draft_specs])
        return len(self.layer_ids) * self.spec.block_bytes(block_size) + of_draft

    def of_rank(self, shard: Shard) -> KVCacheGroup:
        """The same layers, with what a rank keeps of them."""
        of_draft = tuple([spec.of_rank(shard) for spec in self.draft_specs])
        return KVCacheGroup(self.layer_ids, self.spec.of_rank(shard), of_draft)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The memory to allocate: `num_blocks` blocks of `block_bytes` bytes, shared by all groups.

    A block belongs to one group at a time, whose layers divide its bytes among themselves. Groups may use different
    numbers of bytes; a block is as large as the largest of them.
    """

    block_size: int
    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0
    """Number of blocks of the host tier, for swapped-out requests and spilled blocks."""
    max_chunk: int | None = None
    """Largest number of tokens of one sequence in a step. It limits the blocks that a group with a window uses."""
    num_ranks: int = 1
    """Processes that each keep a part of every block."""
    num_machines: int = 1
    """Among which these are divided. This one has the first, and so the largest parts."""
    stages: tuple[Range, ...] = ()
    """The layers of each stage of this machine. Each stage keeps its layers' part of every block, in `num_ranks`
    processes. Empty: one stage has all."""

    @property
    def block_bytes(self) -> int:
        """A whole block, with all layers of its group, in all ranks of this machine."""
        if self.stages or self.num_ranks > 1:
            return sum([part.block_bytes for part in self._parts()])
        largest = max(group.block_bytes(self.block_size) for group in self.groups)
        return -(-largest // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT

    def of_rank(self, shard: Shard) -> KVCacheConfig:
        """What one rank allocates."""
        groups = tuple([group.of_rank(shard) for group in self.groups])
        return dataclasses.replace(self, groups=groups, num_ranks=1, num_machines=1)

    def of_stage(self, layers: Range) -> KVCacheConfig:
        """What the processes of one stage allocate: its layers, numbered from 0, and a draft model's in the last."""
        (first, end), num_layers = layers, sum(len(group.layer_ids) for group in self.groups)
        groups = [
            KVCacheGroup(
                tuple([layer - first for layer in group.layer_ids if first <= layer < end]),
                group.spec,
                group.draft_specs if end == num_layers else (),
            )
            for group in self.groups
        ]
        return dataclasses.replace(self, groups=tuple(groups), stages=())

    def _parts(self) -> list[KVCacheConfig]:
        """What each process of this machine allocates."""
        stages = [self.of_stage(layers) for layers in self.stages] or [self]
        own_ranks = range(self.num_ranks // self.num_machines)
        return [stage.of_rank(Shard(rank, self.num_ranks)) for stage in stages for rank in own_ranks]

    @property
    def total_bytes(self) -> int:
        """The whole device tier."""
        return self.num_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """The whole host tier."""
        return self.num_host_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        """What all layers keep of a token, as long as each of them keeps it."""
        parts = self._parts() if self.stages or self.num_ranks > 1 else [self]
        groups = [group for part in parts for group in part.groups]
        return sum(group.block_bytes(self.block_size) for group in groups) / self.block_size

    def blocks_to_hold(self, num_tokens: int) -> int:
        """Blocks, in all groups together, that a sequence may hold at once on its way to `num_tokens` tokens."""
        return sum(group.spec.max_blocks(num_tokens, self.block_size, self.max_chunk) for group in self.groups)

    @property
    def keeps_nothing(self) -> bool:
        """Whether no layer keeps anything, so that sequences have no blocks and run whole in one step."""
        return all(isinstance(group.spec, NoCacheSpec) for group in self.groups)

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
