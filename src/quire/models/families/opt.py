"""OPT (Zhang et al. 2022): learned positions, LayerNorm before or after each block, an ungated MLP, biases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.errors import CheckpointError
from quire.config.kv_cache import KVCacheSpec, attention_spec
from quire.config.model import ModelConfig
from quire.models.base import CausalLM
from quire.models.layers.activation import activation_kind
from quire.models.layers.attention import Attention
from quire.models.layers.batch_tensors import BatchTensors, LayerKVCache
from quire.models.layers.embedding import Embedding, TiedLmHead
from quire.models.layers.linear import Linear, LmHead
from quire.models.layers.norm import LayerNorm

_POSITION_OFFSET = 2
"""position 0 is row 2 of the table: the rows before it were a padding token's"""


@dataclass(frozen=True, slots=True)
class OPTShape:
    """What config.json says."""

    hidden_size: int
    embed_width: int
    """of the token table; other than hidden_size (opt-350m), projections lead in and out"""
    ffn_dim: int
    num_layers: int
    num_heads: int
    pre_norm: bool
    final_norm: bool
    bias: bool
    affine: bool
    activation: str
    tied: bool
    dtype: torch.dtype

    @classmethod
    def read(cls, config: ModelConfig) -> "OPTShape":
        """Raises CheckpointError where the config is malformed."""
        hf = config.hf_config
        hidden_size, num_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
        if hidden_size % num_heads:
            raise CheckpointError(f"{hf.source}: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
        pre_norm = hf.flag("do_layer_norm_before", True)
        return cls(
            hidden_size=hidden_size,
            embed_width=hf.size("word_embed_proj_dim", hidden_size),
            ffn_dim=hf.size("ffn_dim"),
            num_layers=hf.size("num_hidden_layers"),
            num_heads=num_heads,
            pre_norm=pre_norm,
            final_norm=pre_norm and not hf.flag("_remove_final_layer_norm", False),
            bias=hf.flag("enable_bias", True),
            affine=hf.flag("layer_norm_elementwise_affine", True),
            activation=activation_kind(hf, "activation_function", "relu"),
            tied=hf.flag("tie_word_embeddings", True),
            dtype=getattr(torch, config.dtype),
        )

    def linear(self, in_features: int, out_features: int | tuple[int, ...]) -> Linear:
        """A projection of a block: all of them have a bias, or none."""
        return Linear(in_features, out_features, bias=self.bias, dtype=self.dtype)

    def norm(self) -> LayerNorm:
        """A norm over the hidden size."""
        return LayerNorm(self.hidden_size, affine=self.affine)


class OPTForCausalLM(CausalLM):
    """All sizes, 350m with its post-norm and narrower token table included."""

    renames: ClassVar = ((r"^(model\.)?decoder\.", ""),)
    fused: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = OPTShape.read(config)
        self.embed_tokens = Embedding(config.vocab_size, shape.embed_width, shape.dtype, packed=shape.tied)
        self.embed_positions = Embedding(
            config.max_position_embeddings + _POSITION_OFFSET,
            shape.hidden_size,
            shape.dtype,
            first_row=_POSITION_OFFSET,
        )
        projected = shape.embed_width != shape.hidden_size
        self.project_in = _projection(shape.embed_width, shape.hidden_size, shape.dtype) if projected else None
        self.project_out = _projection(shape.hidden_size, shape.embed_width, shape.dtype) if projected else None
        self.layers = nn.ModuleList(OPTLayer(shape) for _ in range(shape.num_layers))
        self.final_layer_norm = shape.norm() if shape.final_norm else None
        self.lm_head = (
            TiedLmHead(self.embed_tokens) if shape.tied else LmHead(shape.embed_width, config.vocab_size, shape.dtype)
        )

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        shape = OPTShape.read(config)
        head_dim = shape.hidden_size // shape.num_heads
        return [attention_spec(shape.num_heads, head_dim, config.dtype) for _ in range(shape.num_layers)]

    @classmethod
    def ties_embeddings(cls, config: ModelConfig) -> bool:
        return OPTShape.read(config).tied

    def forward(self, batch: BatchTensors, kv: Sequence[LayerKVCache]) -> Tensor:
        residual = self.embed(batch)  # [num_tokens, embed_width]
        if self.project_in is not None:
            residual = self.project_in(residual, batch)
        kernels.add(self.embed_positions(batch.positions), residual)  # [num_tokens, hidden]
        x: Tensor | None = None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, batch, layer_kv)
        if self.final_layer_norm is not None and x is not None:
            residual = self.final_layer_norm.add(x, residual)
        elif x is not None:
            kernels.add(x, residual)
        return residual if self.project_out is None else self.project_out(residual, batch)


class OPTLayer(nn.Module):
    """Attention and MLP; each residual sum is one kernel with the norm that follows it."""

    def __init__(self, shape: OPTShape) -> None:
        super().__init__()
        self.pre_norm = shape.pre_norm
        self.activation = shape.activation
        self.self_attn = OPTAttention(shape)
        self.self_attn_layer_norm = shape.norm()
        self.fc1 = shape.linear(shape.hidden_size, shape.ffn_dim)
        self.fc2 = shape.linear(shape.ffn_dim, shape.hidden_size)
        self.final_layer_norm = shape.norm()

    def forward(
        self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerKVCache
    ) -> tuple[Tensor | None, Tensor]:
        """x [num_tokens, hidden] is yet to be added to residual (None: nothing is); returns the same two."""
        if self.pre_norm:
            normed = self.self_attn_layer_norm(residual) if x is None else self.self_attn_layer_norm.add(x, residual)
            normed = self.final_layer_norm.add(self.self_attn(normed, batch, kv), residual)
            return self._mlp(normed, batch), residual
        hidden = self.self_attn_layer_norm.add(self.self_attn(residual, batch, kv), residual)
        return None, self.final_layer_norm.add(self._mlp(hidden, batch), hidden)

    def _mlp(self, x: Tensor, batch: BatchTensors) -> Tensor:
        out: Tensor = self.fc2(kernels.activation(self.fc1(x, batch), self.activation), batch)
        return out


class OPTAttention(nn.Module):
    """Multi-head attention without a position term: positions were added to the embeddings."""

    def __init__(self, shape: OPTShape) -> None:
        super().__init__()
        hidden_size = shape.hidden_size
        self.num_heads = shape.num_heads
        self.head_dim = hidden_size // shape.num_heads
        self.qkv_proj = shape.linear(hidden_size, (hidden_size, hidden_size, hidden_size))
        self.out_proj = shape.linear(hidden_size, hidden_size)
        self.attn = Attention(self.head_dim**-0.5)

    def forward(self, x: Tensor, batch: BatchTensors, kv: LayerKVCache) -> Tensor:
        heads = self.qkv_proj(x, batch).unflatten(1, (-1, self.head_dim))  # [num_tokens, 3 * num_heads, head_dim]
        query, key, value = heads.split(self.num_heads, dim=1)
        out: Tensor = self.out_proj(self.attn(query, key, value, batch, kv).flatten(1), batch)
        return out


def _projection(in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
    return Linear(in_features, out_features, bias=False, dtype=dtype)
