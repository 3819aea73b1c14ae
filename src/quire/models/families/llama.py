"""Llama 2 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024): the decoder that Mistral and Qwen share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What tells the members of the family apart."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]
    """one per layer; None sees all"""
    hidden_act: str
    rms_norm_eps: float
    tied: bool
    dtype: torch.dtype
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head, before the rotary embedding"""

    @classmethod
    def read(cls, config: ModelConfig) -> "DecoderShape":
        """What config.json says of every member: full attention, no biases, and no norms of heads."""
        hf = config.hf_config
        hidden_size, num_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
        num_kv_heads = hf.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{hf.source}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
            )
        return cls(
            hidden_size=hidden_size,
            intermediate_size=hf.size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=hf.size("head_dim", hidden_size // num_heads),
            sliding_windows=(None,) * hf.size("num_hidden_layers"),
            hidden_act=activation_kind(hf, "hidden_act", "silu"),
            rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
            tied=hf.flag("tie_word_embeddings", False),
            dtype=getattr(torch, config.dtype),
        )


class LlamaForCausalLM(CausalLM):
    """Decoder of RMSNorm, attention with rotary embedding, and gated MLP. Siblings override `shape`."""

    renames: ClassVar = ((r"^model\.", ""),)
    fused: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = self.shape(config)
        self.embed_tokens = Embedding(config.vocab_size, shape.hidden_size, shape.dtype, packed=shape.tied)
        self.rotary = RotaryEmbedding(config, shape.head_dim)
        self.layers = nn.ModuleList(LlamaLayer(shape, self.rotary, window) for window in shape.sliding_windows)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = (
            TiedLmHead(self.embed_tokens) if shape.tied else LmHead(shape.hidden_size, config.vocab_size, shape.dtype)
        )

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        """What config.json says of this family."""
        shape, bias = DecoderShape.read(config), config.hf_config.flag("attention_bias", False)
        return replace(shape, qkv_bias=bias, o_bias=bias, mlp_bias=config.hf_config.flag("mlp_bias", False))

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        shape = cls.shape(config)
        return [
            attention_spec(shape.num_kv_heads, shape.head_dim, config.dtype, window) for window in shape.sliding_windows
        ]

    @classmethod
    def ties_embeddings(cls, config: ModelConfig) -> bool:
        return cls.shape(config).tied

    def forward(self, batch: BatchTensors, kv: Sequence[LayerKVCache]) -> Tensor:
        residual = self.embed(batch)  # [num_tokens, hidden]
        x: Tensor | None = None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x = layer(x, residual, batch, layer_kv)
        assert x is not None
        return self.norm.add(x, residual)


class LlamaLayer(nn.Module):
    """Attention and MLP. The residual is summed in place, each sum in one kernel with the norm that follows it."""

    def __init__(self, shape: DecoderShape, rotary: RotaryEmbedding, sliding_window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = LlamaAttention(shape, rotary, sliding_window)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerKVCache) -> Tensor:
        """x [num_tokens, hidden] is yet to be added to residual (None: nothing is); so is what this returns."""
        x = self.input_layernorm(residual) if x is None else self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm.add(self.self_attn(x, batch, kv), residual)
        out: Tensor = self.mlp(x, batch)
        return out


class LlamaAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary embedding, and head norms where the shape says so."""

    def __init__(self, shape: DecoderShape, rotary: RotaryEmbedding, sliding_window: int | None) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.head_dim = head_dim
        self.num_heads = (num_heads, num_kv_heads, num_kv_heads)
        self.qkv_proj = Linear(
            shape.hidden_size, tuple(n * head_dim for n in self.num_heads), bias=shape.qkv_bias, dtype=shape.dtype
        )
        self.o_proj = Linear(num_heads * head_dim, shape.hidden_size, bias=shape.o_bias, dtype=shape.dtype)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)
        self.rotary = rotary
        self.attn = Attention(head_dim**-0.5, kernels.AttentionVariant(sliding_window))

    def forward(self, x: Tensor, batch: BatchTensors, kv: LayerKVCache) -> Tensor:
        heads = self.qkv_proj(x, batch).unflatten(1, (-1, self.head_dim))  # [num_tokens, all heads, head_dim]
        query, key, value = heads.split(self.num_heads, dim=1)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
            self.rotary(batch.positions, query, key)
        else:
            self.rotary(batch.positions, heads[:, : -self.num_heads[2]])  # queries and keys lie side by side
        out: Tensor = self.o_proj(self.attn(query, key, value, batch, kv).flatten(1), batch)
        return out


class LlamaMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.intermediate_size
        self.gate_up_proj = Linear(shape.hidden_size, (width, width), bias=shape.mlp_bias, dtype=shape.dtype)
        self.down_proj = Linear(width, shape.hidden_size, bias=shape.mlp_bias, dtype=shape.dtype)
        self.act = shape.hidden_act

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        out: Tensor = self.down_proj(kernels.gated_activation(self.gate_up_proj(x, batch), self.act), batch)
        return out
