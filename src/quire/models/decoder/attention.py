"""A layer's attention: projections, norms and rotation of heads, and the paged attention of the layer library."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.errors import UnsupportedModelError
from quire.config.parallel import Range
from quire.kernels import AttentionVariant, EncoderVariant
from quire.models.decoder.shapes import AttentionShape, HeadNormShape, QKVLayout, Span
from quire.models.layers.attention import Attention, EncoderAttention, SinkAttention
from quire.models.layers.batch_tensors import BatchTensors, LayerKVCache
from quire.models.layers.linear import Linear, scaled_by
from quire.models.layers.norm import RMSNorm, make_norm
from quire.models.layers.rotary import RotaryEmbedding
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec

HeadStep = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From query, key, value [num_tokens, num_heads, head_dim] and positions [num_tokens] to query and key. It may write to
all that it gets."""


class Heads(Protocol):
    """From heads side by side and positions to queries, keys and values."""

    num_heads: tuple[int, int, int]

    def __call__(self, heads: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class SelfAttention(nn.Module):
    """Attention of one layer."""

    def __init__(
        self, shape: AttentionShape, hidden_size: int, dtype: torch.dtype, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        head_dim = self.head_dim = shape.head_dim
        num_heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        sizes = tuple(n * head_dim for n in num_heads)
        is_apart, is_transposed = shape.qkv_layout is QKVLayout.APART, shape.is_transposed
        self.qkv_proj = Linear(
            shape.input_width or hidden_size,
            sizes if is_apart else sum(sizes),
            bias=shape.qkv_bias,
            dtype=dtype,
            is_transposed=is_transposed,
            blocks=_blocks(shape),
        )
        if shape.clip is not None and shape.head_norm is None:
            self.qkv_proj.changes = (partial(kernels.clip, limit=shape.clip),)
        self.o_proj = Linear(sizes[0], hidden_size, bias=shape.o_bias, dtype=dtype, is_transposed=is_transposed)
        self.o_proj.changes = scaled_by(shape.output_multiplier)
        self.shape, self.attn = shape, _attention(shape)
        self._heads: Heads = self._make_heads(shape, num_heads, rotary)

    def _make_heads(
        self, shape: AttentionShape, num_heads: tuple[int, int, int], rotary: RotaryEmbedding | None
    ) -> "RotatedHeads | SteppedHeads":
        if rotary is not None and rotary.is_uniform and shape.head_norm is None:
            return RotatedHeads(num_heads, rotary)
        steps: list[HeadStep] = [] if rotary is None else [partial(_rotate, rotary)]
        if shape.head_norm is not None:
            self.q_norm = _head_norm(shape.head_norm, shape.num_heads, shape.head_dim)
            self.k_norm = _head_norm(shape.head_norm, shape.num_kv_heads, shape.head_dim)
            after = [] if shape.clip is None else [partial(_clip, shape.clip)]
            at = len(steps) if shape.head_norm.after_rope else 0
            steps[at:at] = [self._norm_pair, *after]
        return SteppedHeads(num_heads, tuple(steps))

    def forward(self, x: Tensor, batch: BatchTensors, kv: LayerKVCache) -> Tensor:
        """x [num_tokens, hidden] -> as x, of the tokens that are read; writes keys and values of all into `kv`."""
        query, key, value = self._project(x, batch)
        attended, batch = batch.narrowed(self.attn(query, key, value, batch, kv).flatten(1))
        out: Tensor = self.o_proj(attended, batch)
        return out

    def write(self, x: Tensor, batch: BatchTensors, kv: LayerKVCache) -> None:
        """Write what `forward` writes."""
        _, key, value = self._project(x, batch)
        assert isinstance(self.attn, Attention)
        self.attn.write(key, value, batch, kv)

    def _project(self, x: Tensor, batch: BatchTensors) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(x, batch).unflatten(1, (-1, self.head_dim))  # [num_tokens, all heads, head_dim]
        return self._heads(heads, batch.positions)

    @property
    def mixes_heads(self) -> bool:
        """Whether norms read several heads of a token, or have weights for each."""
        norm = self.shape.head_norm
        return norm is not None and not (norm.span is Span.HEAD and norm.norm.is_rms)

    def keep_heads(self, queries: Range, keys: Range) -> None:
        """Attend with these heads alone, before weights are loaded: those of `qkv_proj`, or of all where it gives all.
        Projections are the caller's."""
        counts = tuple(end - start for start, end in (queries, keys, keys))
        if self.mixes_heads:
            self._heads = OwnHeads(self._heads, queries, keys)
        else:
            self._heads.num_heads = counts[0], counts[1], counts[2]
        if self.attn.variant.slopes is not None:
            self.attn.variant = replace(self.attn.variant, slopes=self.attn.variant.slopes[slice(*queries)].clone())
        if isinstance(self.attn, SinkAttention):
            self.attn.kept = queries

    def _norm_pair(self, query: Tensor, key: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(query), self.k_norm(key)


def _rotate(rotary: RotaryEmbedding, query: Tensor, key: Tensor, _: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rotary.rotate_pair(query, key, positions)


def _clip(limit: float, query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    for heads in (query, key, value):
        kernels.clip(heads, limit)
    return query, key


class RotatedHeads:
    """Splits heads into queries, keys and values, of which the first two are rotated in one call: they lie side by
    side."""

    def __init__(self, num_heads: tuple[int, int, int], rotary: RotaryEmbedding) -> None:
        self.num_heads = num_heads
        self._rotary = rotary

    def __call__(self, heads: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [num_tokens, all heads, head_dim] -> query, key, value [num_tokens, their heads, head_dim]."""
        self._rotary(positions, heads[:, : -self.num_heads[2]])
        query, key, value = heads.split_with_sizes(self.num_heads, dim=1)
        return query, key, value


class SteppedHeads:
    """Splits heads into queries, keys and values, and takes them through steps."""

    def __init__(self, num_heads: tuple[int, int, int], steps: tuple[HeadStep, ...]) -> None:
        self.num_heads = num_heads
        self._steps = steps

    def __call__(self, heads: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [num_tokens, all heads, head_dim] -> query, key, value [num_tokens, their heads, head_dim]."""
        query, key, value = heads.split_with_sizes(self.num_heads, dim=1)
        for step in self._steps:
            query, key = step(query, key, value, positions)
        return query, key, value


class OwnHeads:
    """Some of the heads that are made of all."""

    def __init__(self, all_heads: "Heads", queries: Range, keys: Range) -> None:
        self._all_heads, self._queries, self._keys = all_heads, slice(*queries), slice(*keys)
        self.num_heads = all_heads.num_heads

    def __call__(self, heads: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [num_tokens, all heads, head_dim] -> query, key, value [num_tokens, own heads, head_dim]."""
        query, key, value = self._all_heads(heads, positions)
        return query[:, self._queries], key[:, self._keys], value[:, self._keys]


class ProjectionNorm(RMSNorm):
    """RMSNorm over all heads of a token together."""

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, num_heads, head_dim], each token's heads in one piece -> as x, in new memory."""
        return super().forward(x.flatten(1).unsqueeze(1)).view(x.shape)


def _head_norm(shape: HeadNormShape, num_heads: int, head_dim: int) -> WeightedLayer:
    if shape.span is Span.PROJECTION:
        return ProjectionNorm(num_heads * head_dim, shape.norm)
    if shape.span is Span.HEAD and shape.norm.is_rms:
        return make_norm(head_dim, shape.norm)
    return HeadLayerNorm(num_heads, head_dim, shape)


class HeadLayerNorm(WeightedLayer):
    """LayerNorm over each head, by weights of its own or by those of all heads."""

    weight: Tensor

    def __init__(self, num_heads: int, head_dim: int, shape: HeadNormShape) -> None:
        super().__init__()
        self.size = num_heads, head_dim
        self.shape = shape
        self.bias: Tensor | None = None

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        kinds = ("weight", "bias") if self.shape.norm.has_bias else ("weight",)
        if self.shape.is_apart:
            names = [f"norms.{head}.{kind}" for kind in kinds for head in range(self.size[0])]
        else:
            names = list(kinds)
        is_shared = self.shape.span is Span.HEAD or self.shape.is_apart
        part = Part(self.size[1:] if is_shared else self.size)
        return {name: WeightSpec((part,), torch.float32) for name in names}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = self._of_heads(tensors, "weight")
        self.bias = self._of_heads(tensors, "bias") if self.shape.norm.has_bias else None

    def _of_heads(self, tensors: Mapping[str, Tensor], kind: str) -> Tensor:
        """[num_heads, head_dim], in new memory."""
        found = [tensor for name, tensor in tensors.items() if name.endswith(kind)]
        whole = torch.empty(self.size, device=found[0].device)
        if not whole.is_meta:
            whole.copy_(torch.stack(found) if self.shape.is_apart else found[0])
        return whole

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, num_heads, head_dim] -> as x, in new memory."""
        return kernels.head_layer_norm(x, self.weight, self.bias, self.shape.norm.eps)


def _attention(shape: AttentionShape) -> Attention | EncoderAttention:
    slopes = None if shape.slopes is None else torch.tensor(shape.slopes)
    if not shape.is_causal:
        if shape.softcap is not None or shape.chunk_size is not None or shape.has_sinks:
            raise UnsupportedModelError("attention in both directions with caps, chunks or sinks is not supported")
        return EncoderAttention(shape.scale, EncoderVariant(shape.sliding_window, slopes))
    variant = AttentionVariant(shape.sliding_window, shape.chunk_size, shape.softcap, slopes=slopes)
    return SinkAttention(shape.scale, variant, shape.num_heads) if shape.has_sinks else Attention(shape.scale, variant)


def _blocks(shape: AttentionShape) -> tuple[int, ...] | None:
    """The heads of the checkpoint's tensor in the order queries, keys, values; None if that is its order."""
    if shape.qkv_layout is not QKVLayout.BY_GROUP:
        return None
    num_groups, num_queries = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    groups = [range(group * (num_queries + 2), (group + 1) * (num_queries + 2)) for group in range(num_groups)]
    queries = [head for group in groups for head in group[:num_queries]]
    return (*queries, *(group[-2] for group in groups), *(group[-1] for group in groups))
