"""The decoder: one class, which a family describes from its config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.errors import UnsupportedModelError
from quire.config.checkpoint.draft_heads import OUTPUT
from quire.config.hf_config import HFConfig
from quire.config.kv_cache import KVCacheSpec, NoCacheSpec
from quire.config.model import ModelConfig, rope_config
from quire.models.base import CausalLM
from quire.models.decoder.layers import LAYERS, DecoderLayer, summing
from quire.models.decoder.reading import Setting, check_experts, read_heads, read_setting, read_window
from quire.models.decoder.shapes import (
    Arrangement,
    AttentionShape,
    DecoderShape,
    HeadNormShape,
    LayerShape,
    MLPShape,
    QKVLayout,
    Span,
)
from quire.models.decoder.watch import Watch
from quire.models.layers.activation import activation_kind
from quire.models.layers.batch_tensors import BatchTensors, LayerCache
from quire.models.layers.embedding import Embedding, TiedLmHead
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.linear import Linear, LmHead, NormalizedLmHead, scaled_by
from quire.models.layers.norm import NormShape, make_norm
from quire.models.layers.rotary import RopeShape, shared_rotary
from quire.models.weights.stacked import STACKS, Stack

Enter = Callable[[BatchTensors], tuple[Tensor | None, Tensor]]
"""What the first layer gets: x, or None, and residual."""
Leave = Callable[[Tensor | None, Tensor, BatchTensors], Tensor]
"""From what the last layer returns to hidden states."""
Step = Callable[[Tensor, BatchTensors], Tensor]
"""From [num_tokens, one width] to [num_tokens, the same or another width]. It may write to what it gets."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses from one stage's layers to the next one's: for each token, rows of so many tensors."""

    num_tensors: int
    """2 (residual and x), 1 where x is None, 0 at the ends of the model."""
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Of one token, in all tensors."""
        return self.num_tensors * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Of one token, in one tensor."""
        return self.width * self.dtype.itemsize


class Decoder(CausalLM):
    """A decoder as `shape` describes it.

    A family states what differs from Llama without biases: by the attributes below, or where they do not suffice, by
    overriding `shape`, or the parts of it: `layer_shape`, `arrangement_of`, `attention_shape`, `window`, `mlp_shape`,
    `experts_shape`, `norm_shape`, `rope_shape`. They take the layer's number, and read the config alone.
    """

    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"^model\.", ""),)
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    ties_by_default: ClassVar[bool] = False
    """Whether a config without `tie_word_embeddings` means a head that uses the token table."""
    has_rope: ClassVar[bool] = True
    """Whether heads are rotated, in layers for which `rope_shape` does not say otherwise."""
    has_interleaved_rope: ClassVar[bool] = False
    """Whether heads are rotated in pairs of neighbouring dimensions."""
    token_head_has_dense: ClassVar[bool] = False
    """Whether what classifies tokens has a dense layer of its own."""
    default_head_dim: ClassVar[int | None] = None
    """The head_dim of a config without the key. None: hidden_size divided by the number of heads."""
    default_norm: ClassVar[NormShape] = NormShape(1e-6)
    """The norms over the hidden size, with the epsilon of a config without the key."""
    default_activation: ClassVar[str] = "silu"
    """Of the MLP, in a config without `hidden_act`."""
    default_mlp_ratio: ClassVar[int | None] = None
    """The width of the MLP divided by hidden_size, in a config without `intermediate_size`. None: it must be there."""
    has_gated_mlp: ClassVar[bool] = True
    """Whether the MLP multiplies by a gate."""
    has_stacked_mlp: ClassVar[bool] = False
    """Whether the checkpoint has gate and up in one tensor."""
    mlp_bias: ClassVar[Setting] = False
    """Whether all projections of the MLP have biases."""
    qkv_bias: ClassVar[Setting] = False
    """Whether the projections to queries, keys and values have biases."""
    o_bias: ClassVar[Setting] = False
    """Whether the projection of what attention gives has one."""
    head_bias: ClassVar[Setting] = False
    """Whether the language model head has one."""
    qkv_layout: ClassVar[QKVLayout] = QKVLayout.APART
    """How the checkpoint stores the projections to queries, keys and values."""
    is_transposed: ClassVar[Setting] = False
    """Whether the checkpoint has the matrices of attention and MLP as [in, out]."""
    has_head_norm: ClassVar[Setting] = False
    """Whether queries and keys have norms, like those over the hidden size."""
    head_norm_span: ClassVar[Span] = Span.HEAD
    """What these norms are taken over."""
    norms_rotated_heads: ClassVar[bool] = False
    """Whether heads are rotated before their norms."""
    has_window: ClassVar[bool] = False
    """Whether the config's `sliding_window`, if there is one, is that of all layers."""
    arrangement: ClassVar[Arrangement] = Arrangement.PRE_NORM
    """Of all layers, unless `arrangement_of` says otherwise."""
    has_embed_norm: ClassVar[bool] = False
    """Whether embeddings have a norm, like those over the hidden size."""

    def __init__(self, config: ModelConfig, *, has_head: bool = True) -> None:
        """Without a head, `compute_logits` is not to be called, and the token table is only a table."""
        super().__init__()
        shape = self.shape(config)
        if has_head and any(isinstance(spec, NoCacheSpec) for spec in type(self).kv_cache_specs(config)):
            raise UnsupportedModelError(
                f"{config.hf_config.source}: attention in both directions ('use_bidirectional_attention' is true, or "
                "'is_causal' false) is for models that pool (runner='pooling'): text is generated from left to right"
            )
        self._widths = shape.hidden_size, shape.embed_width
        self._dtype = shape.dtype
        is_packed = shape.is_tied and has_head
        self.embed_tokens = Embedding(config.vocab_size, shape.embed_width, shape.dtype, packed=is_packed)
        self.embed_tokens.changes = scaled_by(shape.embed_multiplier)
        self._before = self._make_inputs(shape)
        self.rotary = nn.ModuleList()
        self.layers = nn.ModuleList()
        has_x = False
        for layer in shape.layers:
            made = self._make_layer(config, layer, shape, has_x)
            has_x = made.returns_x
            self.layers.append(made)
        self.passes: list[Callable[..., Any]] = list(self.layers)
        """What `forward` calls of each layer."""
        self.enter: Enter | None = None
        """What takes the place of the embedding, in a stage that has none. None, not a method of this object: a cycle
        of references would outlive an engine that sleeps, whose objects are exempt from collection."""
        self.leave: Leave | None = None
        """The same for the final norm."""
        self.boundaries = Boundary(0, shape.hidden_size, shape.dtype), Boundary(0, shape.hidden_size, shape.dtype)
        """What comes from the stage before and goes to the next one: nothing, unless this is a stage (stages.py)."""
        self.norm = None if shape.final_norm is None else make_norm(shape.hidden_size, shape.final_norm)
        self._sum = summing(self.norm, has_x=has_x)
        self.can_narrow = not isinstance(shape.layers[-1].attention.cache_spec(config.dtype), NoCacheSpec)
        self._after: list[Step] = []
        if shape.embed_width != shape.hidden_size:
            self.project_out = Linear(shape.hidden_size, shape.embed_width, bias=False, dtype=shape.dtype)
            self._after.append(self.project_out)
        if not has_head:
            return
        make_head = NormalizedLmHead if shape.is_head_normalized else LmHead
        self.lm_head = (
            TiedLmHead(self.embed_tokens)
            if shape.is_tied
            else make_head(shape.embed_width, config.vocab_size, shape.dtype, bias=shape.head_bias)
        )
        self.lm_head.changes = scaled_by(shape.logit_multiplier)
        if shape.logit_softcap is not None:
            self.lm_head.changes += (partial(kernels.softcap, cap=shape.logit_softcap),)

    def _make_inputs(self, shape: DecoderShape) -> list[Step]:
        """What is done to the embeddings before the first layer."""
        steps: list[Step] = []
        if shape.embed_width != shape.hidden_size:
            self.project_in = Linear(shape.embed_width, shape.hidden_size, bias=False, dtype=shape.dtype)
            steps.append(self.project_in)
        if shape.positions is not None:
            rows, first = shape.positions.num_rows, shape.positions.first_row
            self.embed_positions = Embedding(rows, shape.hidden_size, shape.dtype, first_row=first)
            steps.append(self._add_positions)
        if shape.embed_norm is not None:
            self.embed_norm = make_norm(shape.hidden_size, shape.embed_norm)
            steps.append(lambda x, _: self.embed_norm(x))
        return steps

    def _add_positions(self, x: Tensor, batch: BatchTensors) -> Tensor:
        kernels.add(self.embed_positions(batch.positions), x)
        return x

    def _make_layer(self, config: ModelConfig, layer: LayerShape, shape: DecoderShape, has_x: bool) -> DecoderLayer:
        rotary = None if layer.attention.rope is None else shared_rotary(self.rotary, config, layer.attention.rope)
        return LAYERS[layer.arrangement](layer, shape.hidden_size, shape.dtype, rotary, has_x)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return STACKS

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        """What the config says. Raises CheckpointError or UnsupportedModelError for one that cannot be run."""
        hf = config.hf_config
        layers = tuple(cls.layer_shape(hf, layer) for layer in range(hf.size("num_hidden_layers")))
        check_experts(hf, layers)
        return DecoderShape(
            hidden_size=hf.size("hidden_size"),
            layers=layers,
            final_norm=cls.norm_shape(hf),
            is_tied=hf.flag("tie_word_embeddings", cls.ties_by_default),
            dtype=getattr(torch, config.dtype),
            embed_width=hf.size("hidden_size"),
            embed_norm=cls.norm_shape(hf) if cls.has_embed_norm else None,
            head_bias=read_setting(hf, cls.head_bias),
        )

    @classmethod
    def layer_shape(cls, hf: HFConfig, layer: int) -> LayerShape:
        """Of layer number `layer`."""
        mlp = cls.experts_shape(hf, layer) or cls.mlp_shape(hf, layer)
        return LayerShape(cls.attention_shape(hf, layer), mlp, cls.norm_shape(hf), cls.arrangement_of(hf))

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        """Of the norms in all layers."""
        return cls.arrangement

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        """Of layer number `layer`."""
        num_heads, num_kv_heads, head_dim = read_heads(hf, cls.default_head_dim)
        norm = HeadNormShape(cls.norm_shape(hf), cls.head_norm_span, cls.norms_rotated_heads)
        return AttentionShape(
            num_heads,
            num_kv_heads,
            head_dim,
            scale=head_dim**-0.5,
            qkv_bias=read_setting(hf, cls.qkv_bias),
            o_bias=read_setting(hf, cls.o_bias),
            qkv_layout=cls.qkv_layout,
            is_transposed=read_setting(hf, cls.is_transposed),
            rope=cls.rope_shape(hf, layer, head_dim),
            head_norm=norm if read_setting(hf, cls.has_head_norm) else None,
            is_causal=hf.flag("is_causal", True),
            sliding_window=cls.window(hf, layer),
        )

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        """The sliding window of layer number `layer`. None: its tokens see all before them."""
        return read_window(hf) if cls.has_window else None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        """Of layer number `layer`; None if it does not rotate heads."""
        if not cls.has_rope:
            return None
        return RopeShape.read(rope_config(hf), head_dim, is_interleaved=cls.has_interleaved_rope)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        """Of layer number `layer`."""
        default = () if cls.default_mlp_ratio is None else (cls.default_mlp_ratio * hf.size("hidden_size"),)
        bias = read_setting(hf, cls.mlp_bias)
        return MLPShape(
            hf.size("intermediate_size", *default),
            activation_kind(hf, "hidden_act", cls.default_activation),
            is_gated=cls.has_gated_mlp,
            is_stacked=cls.has_stacked_mlp,
            up_bias=bias,
            down_bias=bias,
            is_transposed=read_setting(hf, cls.is_transposed),
        )

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        """Of layer number `layer`; None if it has an MLP."""
        return None

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        """Of the norms over the hidden size."""
        key = "rms_norm_eps" if cls.default_norm.is_rms else "layer_norm_eps"
        return replace(cls.default_norm, eps=hf.number(key, cls.default_norm.eps))

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        return [layer.attention.cache_spec(config.dtype) for layer in cls.shape(config).layers]

    @classmethod
    def ties_embeddings(cls, config: ModelConfig) -> bool:
        return cls.shape(config).is_tied

    def forward(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Tensor:
        x, residual = (self.enter or self._embed)(batch)
        (*passes, (last, last_kv)), whole = zip(self.passes, kv, strict=True), batch.whole
        for layer, layer_kv in passes:
            x, residual = layer(x, residual, whole, layer_kv)
        if (read := batch.read) is not None:
            batch = read.batch
            x, residual = self._narrowed(x, residual, whole, last_kv, read.rows)
            if not len(residual):
                return kernels.backend_of(residual).empty((0, self._widths[1]), residual.dtype)
        x, residual = last(x, residual, batch, last_kv)
        return (self.leave or self._finish)(x, residual, batch)

    def _narrowed(
        self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache, rows: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """What the last layer gets of some rows alone. It writes what it keeps of every token."""
        some = None if x is None else kernels.embedding(rows, x), kernels.embedding(rows, residual)
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer)
        last.write(x, residual, batch, kv)
        return some

    def _embed(self, batch: BatchTensors) -> tuple[Tensor | None, Tensor]:
        residual = self.embed(batch)  # [num_tokens, embed_width]
        for step in self._before:
            residual = step(residual, batch)  # at last [num_tokens, hidden]
        return None, residual

    def _finish(self, x: Tensor | None, residual: Tensor, batch: BatchTensors) -> Tensor:
        hidden: Tensor = self._sum(x, residual)
        for step in self._after:
            hidden = step(hidden, batch)
        return hidden

    def watch(self, places: Sequence[int], num_tokens: int) -> list[Tensor]:
        """From now on each pass of at most `num_tokens` tokens also writes hidden states to these tensors
        [num_tokens, width], row by row: what the layer of this number gets, or what the model gives (OUTPUT)."""
        watched = list[Tensor]()
        for place in places:
            if place == OUTPUT:
                watch = Watch(self._widths[1], self._dtype, num_tokens)
                self._after.append(watch.keep)
                self.can_narrow = False
            else:
                watch = Watch(self._widths[0], self._dtype, num_tokens)
                self.passes[place] = partial(watch.run, self.passes[place])
                self.can_narrow &= place != len(self.passes) - 1
            watched.append(watch.rows)
        return watched
