"""Attention over the paged KV cache. Projections, head norms and rotary embedding are the model's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from quire import kernels
from quire.config.parallel import Range
from quire.kernels.variants import PLAIN, AttentionVariant, DistanceTerms, EncoderVariant
from quire.models.layers.batch_tensors import BatchTensors, LayerKVCache
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec


class Attention(nn.Module):
    """Causal attention (Kwon et al. 2023): stores this step's keys and values, then attends to all of each sequence."""

    def __init__(self, scale: float, variant: AttentionVariant = PLAIN) -> None:
        super().__init__()
        self.scale = scale
        self.variant = variant

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: BatchTensors, kv: LayerKVCache) -> Tensor:
        """query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim] -> as query."""
        self.write(key, value, batch, kv)
        tables = batch.groups[kv.group].block_tables
        return kernels.paged_attention(
            query, kv.k, kv.v, batch.query_start, batch.seq_lens, tables, self.scale, self.variant
        )

    def write(self, key: Tensor, value: Tensor, batch: BatchTensors, kv: LayerKVCache) -> None:
        """Store what `forward` stores."""
        kernels.write_kv(key, value, kv.k, kv.v, batch.groups[kv.group].slots)


class HasVariant(Protocol):
    """What comes with weights that say how scores become weights."""

    @property
    def variant(self) -> EncoderVariant: ...


@dataclass(frozen=True, slots=True, eq=False)
class DistanceHeads:
    """What the queries and keys of a layer are multiplied with for what they say of distances."""

    keys: Sequence[kernels.PackedWeight] | None
    """For each head the keys of distances, [num_terms, head_dim]."""
    queries: Sequence[kernels.PackedWeight] | None
    """The same of their queries."""
    term: Tensor
    """As DistanceTerms has it."""

    def terms(self, query: Tensor, key: Tensor) -> DistanceTerms:
        """From query and key [num_tokens, num_heads, head_dim]."""
        of_query = None if self.keys is None else kernels.matmul_heads(query, self.keys)
        of_key = None if self.queries is None else kernels.matmul_heads(key, self.queries)
        return DistanceTerms(of_query, of_key, self.term)


class EncoderAttention(nn.Module):
    """Attention of whole sequences, in both directions, which stores nothing."""

    def __init__(self, scale: float, variant: EncoderVariant) -> None:
        super().__init__()
        self.scale = scale
        self.variant = variant
        self.relative: HasVariant | None = None
        """A layer whose variant takes the place of this one's, since it comes with weights."""
        self.distances: DistanceHeads | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: BatchTensors, kv: LayerKVCache) -> Tensor:
        """query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim] -> as query."""
        variant = self.variant if self.relative is None else self.relative.variant
        terms = None if self.distances is None else self.distances.terms(query, key)
        return kernels.encoder_attention(
            query, key, value, batch.query_start, batch.seq_lens, self.scale, variant, terms
        )


class SinkAttention(Attention, WeightedLayer):
    """Attention whose softmax has one more logit for each head, a weight `sinks` (gpt-oss, 2025)."""

    def __init__(self, scale: float, variant: AttentionVariant, num_heads: int) -> None:
        super().__init__(scale, variant)
        self.num_heads = num_heads
        self.kept: Range | None = None
        """The heads that this rank has. None: all."""

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return {"sinks": WeightSpec((Part((self.num_heads,), self.kept),), torch.float32)}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.variant = replace(self.variant, sinks=tensors["sinks"].clone())  # [num_heads]
