"""The encoder: one class, which a family describes from its config."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.kv_cache import KVCacheSpec, NoCacheSpec
from quire.config.model import ModelConfig
from quire.models.base import Model
from quire.models.decoder.attention import SelfAttention
from quire.models.decoder.layers import LAYERS, summing
from quire.models.decoder.reading import read_heads
from quire.models.decoder.shapes import Arrangement, AttentionShape, LayerShape, MLPShape, PositionsShape
from quire.models.encoder.relative import Distances, RelativeBias
from quire.models.encoder.shapes import EmbeddingsShape, EncoderShape
from quire.models.layers.activation import activation_kind
from quire.models.layers.attention import EncoderAttention
from quire.models.layers.batch_tensors import NO_CACHE, BatchTensors, LayerCache
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Linear
from quire.models.layers.norm import LayerNorm, NormShape, make_norm
from quire.models.layers.rotary import RopeShape, shared_rotary
from quire.models.pooling.heads import HeadShape
from quire.models.weights.stacked import Stack

QKV_STACK = Stack(r"\.(?:Wqkv|qkv_proj)\.(weight|bias)$", (r".q_proj.\1", r".k_proj.\1", r".v_proj.\1"), num_experts=1)
"""The projections to queries, keys and values in one tensor."""
_OTHER_POSITIONS = ("relative_key", "relative_key_query", "alibi")
"""What BERT may have in the place of positions that are added; each adds to the scores of attention."""


class Encoder(Model):
    """An encoder as `shape` describes it: tokens see each other in both directions.

    A family overrides the parts of the description that differ from those of BERT. They read the config alone.
    """

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        r"\.position_ids$",
        r"\.token_type_ids$",
        r"\.inv_freq$",
        r"^(cls|lm_head|pooler|predictions|sop_classifier)\.",
    )
    has_types: ClassVar[bool] = True
    """Whether there is a table for the texts of a pair."""
    has_padding_position: ClassVar[bool] = False
    """Whether position 0 has the row after that of the padding token's id."""
    default_eps: ClassVar[float] = 1e-12
    """Of norms, in a config without it."""
    head_activation: ClassVar[str] = "tanh"
    """Of what classifies a text."""
    token_head_has_dense: ClassVar[bool] = False
    """Whether what classifies tokens has a dense layer of its own."""

    can_narrow = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = self.shape(config)
        embeddings, dtype = shape.embeddings, shape.dtype
        self.embed_tokens: Embedding = Embedding(config.vocab_size, embeddings.width, dtype)
        self.embed_types = Embedding(embeddings.num_types, embeddings.width, dtype) if embeddings.num_types else None
        self.embed_positions: Embedding | None = None
        if (positions := embeddings.positions) is not None:
            self.embed_positions = Embedding(positions.num_rows, embeddings.width, dtype, first_row=positions.first_row)
        self.embed_norm = LayerNorm(embeddings.width, embeddings.norm)
        self.project_in: Linear | None = None
        if embeddings.width != shape.hidden_size:
            self.project_in = Linear(embeddings.width, shape.hidden_size, bias=True, dtype=dtype)
        self.relative_bias: RelativeBias | None = None
        if shape.num_buckets is not None:
            num_heads, max_len = shape.layers[0].attention.num_heads, config.max_position_embeddings
            self.relative_bias = RelativeBias(shape.num_buckets, num_heads, max_len)
        self.rotary = nn.ModuleList()
        self.layers = nn.ModuleList()
        has_x = False
        for layer in shape.layers:
            rope = layer.attention.rope
            rotary = None if rope is None else shared_rotary(self.rotary, config, rope)
            made = LAYERS[layer.arrangement](layer, shape.hidden_size, dtype, rotary, has_x)
            has_x = made.returns_x
            if isinstance(made.self_attn.attn, EncoderAttention):
                made.self_attn.attn.relative = self.relative_bias
            self.layers.append(made)
        if shape.distances is not None:
            layers = [module for module in self.layers.modules() if isinstance(module, SelfAttention)]
            sizes = shape.hidden_size, config.max_position_embeddings
            self.distances = Distances(shape.distances, *sizes, layers)
        self._order = [self.layers[index] for index in shape.order]
        self.norm = None if shape.final_norm is None else make_norm(shape.hidden_size, shape.final_norm)
        self._sum = summing(self.norm, has_x=has_x)

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        """What the config says. Raises CheckpointError or UnsupportedModelError for one that cannot be run."""
        hf = config.hf_config
        if hf.flag("is_decoder", False):
            raise UnsupportedModelError(f"{hf.source}: 'is_decoder' is true: encoders see tokens in both directions")
        if (kind := hf.text("position_embedding_type", "")) in _OTHER_POSITIONS:
            raise UnsupportedModelError(f"{hf.source}: 'position_embedding_type' is {kind!r}: not supported")
        num_layers = hf.size("num_hidden_layers")
        return EncoderShape(
            hidden_size=hf.size("hidden_size"),
            embeddings=cls.embeddings_shape(hf),
            layers=tuple(cls.layer_shape(hf, layer) for layer in range(num_layers)),
            order=tuple(range(num_layers)),
            final_norm=None,
            dtype=getattr(torch, config.dtype),
        )

    @classmethod
    def embeddings_shape(cls, hf: HFConfig) -> EmbeddingsShape:
        """Here of words, positions and the texts of a pair."""
        width = hf.size("embedding_size", hf.size("hidden_size"))
        num_types = hf.count("type_vocab_size", 2) if cls.has_types else 0
        return EmbeddingsShape(width, cls.norm_shape(hf), cls.positions_shape(hf), num_types)

    @classmethod
    def positions_shape(cls, hf: HFConfig) -> PositionsShape | None:
        """Of the table of positions; None if there is none."""
        first = hf.count("pad_token_id", 1) + 1 if cls.has_padding_position else 0
        return PositionsShape(hf.size("max_position_embeddings") + first, first)

    @classmethod
    def layer_shape(cls, hf: HFConfig, layer: int) -> LayerShape:
        """Of layer number `layer`."""
        attention, mlp = cls.attention_shape(hf, layer), cls.mlp_shape(hf)
        return LayerShape(attention, mlp, cls.norm_shape(hf), Arrangement.POST_NORM)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        """Of layer number `layer`: here all tokens see each other."""
        num_heads, num_kv_heads, head_dim = read_heads(hf)
        return AttentionShape(
            num_heads,
            num_kv_heads,
            head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            o_bias=True,
            rope=cls.rope_shape(hf, layer, head_dim),
            is_causal=False,
        )

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        """Of layer number `layer`; None if it does not rotate heads."""
        return None

    @classmethod
    def mlp_shape(cls, hf: HFConfig) -> MLPShape:
        """Here plain, with biases."""
        activation = activation_kind(hf, "hidden_act", "gelu")
        return MLPShape(hf.size("intermediate_size"), activation, is_gated=False, up_bias=True, down_bias=True)

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        """Of all norms."""
        return NormShape(hf.number("layer_norm_eps", cls.default_eps), is_rms=False, has_bias=True)

    @classmethod
    def sequence_head(cls, hf: HFConfig) -> HeadShape:
        """What classifies a text."""
        return HeadShape(has_dense=True, activation=cls.head_activation)

    @classmethod
    def token_head(cls, hf: HFConfig) -> HeadShape:
        """What classifies each token."""
        return HeadShape()

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        return [NoCacheSpec()] * config.hf_config.size("num_hidden_layers")

    def forward(self, batch: BatchTensors, kv: Sequence[LayerCache] = ()) -> Tensor:
        """As Model says; there is nothing to keep, and so no cache."""
        residual = self._embed(batch)  # [num_tokens, hidden]
        x: Tensor | None = None
        (*layers, last), whole = self._order, batch.whole
        for layer in layers:
            x, residual = layer(x, residual, whole, NO_CACHE)
        x, residual = last(x, residual, batch, NO_CACHE)
        return self._sum(x, residual)

    def _embed(self, batch: BatchTensors) -> Tensor:
        words = (_table(self.embed_tokens), batch.token_ids)
        if (given := batch.embeddings) is not None:
            words = (given, torch.arange(len(given), device=given.device))
        tables: list[tuple[Tensor, Tensor | None]] = [words]
        if self.embed_types is not None:
            tables.append((_table(self.embed_types), batch.token_type_ids))
        if self.embed_positions is not None:
            tables.append((_table(self.embed_positions), batch.positions))
        hidden = kernels.embedding_norm(tables, self.embed_norm.weight, self.embed_norm.bias, self.embed_norm.eps)
        return hidden if self.project_in is None else self.project_in(hidden, batch)


def _table(embedding: Embedding) -> Tensor:
    assert isinstance(embedding.table, Tensor)  # never packed: no head is tied to it
    return embedding.table
