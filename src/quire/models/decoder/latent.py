"""A layer's multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2").

A head's key is a product of its matrix and the latent, and a rotated part that all heads share; its value is a product
of another matrix and the latent. Both matrices are absorbed, in prefill and decode alike: a query goes through the
first one into the space of latents, where it meets the latents themselves, and what attention gives there goes through
the second one. So a token keeps one row, and its bits do not depend on how its prompt was cut (ADR 0043).
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire import kernels
from quire.models.decoder.shapes import LatentAttentionShape
from quire.models.layers.batch_tensors import BatchTensors, LayerLatents
from quire.models.layers.linear import Linear, Projection, scaled_by
from quire.models.layers.norm import make_norm
from quire.models.layers.rotary import RotaryEmbedding

Step = Callable[[Tensor, BatchTensors], Tensor]
"""From [num_tokens, hidden] to queries [num_tokens, num_heads * head_dim]."""


class HeadProjections(Projection):
    """The heads' matrices from the latent to keys and values, which a checkpoint has in one tensor: for each head its
    keys' and then its values' rows. They stay in the dtype of the computation."""

    is_quantizable: ClassVar[bool] = False

    def __init__(self, shape: LatentAttentionShape, dtype: torch.dtype) -> None:
        sizes = self._sizes = (shape.plain_dim, shape.value_dim)
        super().__init__(shape.rank, shape.num_heads * sum(sizes), bias=False, dtype=dtype)
        self.absorbs_queries: kernels.HeadWeights
        self.gives_values: kernels.HeadWeights

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        packed = self.matrix_of(tensors)
        assert isinstance(packed, kernels.PackedWeight)
        rows = kernels.unpack_weight(packed).view(-1, sum(self._sizes), self.shape[1])  # [num_heads, both, rank]
        keys, values = rows.split_with_sizes(self._sizes, dim=1)
        self.absorbs_queries = kernels.pack_heads(keys.transpose(1, 2).contiguous())  # [num_heads, rank, plain_dim]
        self.gives_values = kernels.pack_heads(values)  # [num_heads, value_dim, rank]


class LatentAttention(nn.Module):
    """Causal latent attention of one layer."""

    def __init__(
        self, shape: LatentAttentionShape, hidden_size: int, dtype: torch.dtype, rotary: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.shape = shape
        query_size, bias = shape.num_heads * shape.head_dim, shape.has_bias
        if shape.query_rank is None:
            self.q_proj = Linear(hidden_size, query_size, bias=False, dtype=dtype)
            self._queries: Step = self.q_proj
        else:
            self.q_a_proj = Linear(hidden_size, shape.query_rank, bias=bias, dtype=dtype)
            self.q_a_layernorm = make_norm(shape.query_rank, shape.norm)
            self.q_b_proj = Linear(shape.query_rank, query_size, bias=False, dtype=dtype)
            self._queries = self._low_rank_queries
        self.kv_a_proj_with_mqa = Linear(hidden_size, shape.rank + shape.rope.rotary_dim, bias=bias, dtype=dtype)
        self.kv_a_layernorm = make_norm(shape.rank, shape.norm)
        self.kv_b_proj = HeadProjections(shape, dtype)
        self.o_proj = Linear(shape.num_heads * shape.value_dim, hidden_size, bias=bias, dtype=dtype)
        self.o_proj.changes = scaled_by(shape.output_multiplier)
        self.rotary = rotary

    def forward(self, x: Tensor, batch: BatchTensors, kv: LayerLatents) -> Tensor:
        """x [num_tokens, hidden] -> as x; writes the latents of the tokens into `kv`."""
        shape, group = self.shape, batch.groups[kv.group]
        query = self.write(x, batch, kv)
        query = kernels.multiply_heads(query, self.kv_b_proj.absorbs_queries)  # [num_tokens, num_heads, row's width]
        out = kernels.latent_attention(
            query, kv.rows, batch.query_start, batch.seq_lens, group.block_tables, shape.rank, shape.scale
        )
        values = kernels.multiply_heads(out, self.kv_b_proj.gives_values)  # [num_tokens, num_heads, value_dim]
        result: Tensor = self.o_proj(values.flatten(1), batch)
        return result

    def write(self, x: Tensor, batch: BatchTensors, kv: LayerLatents) -> Tensor:
        """Write what `forward` writes, and return the queries [num_tokens, num_heads, head_dim]."""
        shape = self.shape
        query = self._queries(x, batch).view(len(x), -1, shape.head_dim)
        latent, key = self.kv_a_proj_with_mqa(x, batch).unsqueeze(1).split([shape.rank, shape.rope.rotary_dim], dim=2)
        self.rotary(batch.positions, query[:, :, shape.plain_dim :], key)  # key [num_tokens, 1, rotary_dim]
        slots = batch.groups[kv.group].slots
        kernels.write_latents(self.kv_a_layernorm(latent).squeeze(1), key.squeeze(1), kv.rows, slots)
        return query

    def _low_rank_queries(self, x: Tensor, batch: BatchTensors) -> Tensor:
        result: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, batch)), batch)
        return result
