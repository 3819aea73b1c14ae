"""One class for each arrangement of norms, attention and MLP.

A layer gets `x`, which is not yet added to `residual`, and returns the same two, so that a sum and the norm after it
are one kernel. Where nothing is to be added, x is None. A layer may write to both. Names are used again, so that what
they stood for does not take memory while the MLP runs, which needs most.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire import kernels
from quire.models.decoder.attention import SelfAttention
from quire.models.decoder.latent import LatentAttention
from quire.models.decoder.mlp import make_mlp
from quire.models.decoder.shapes import Arrangement, AttentionShape, LatentAttentionShape, LayerShape
from quire.models.layers.batch_tensors import BatchTensors, LayerCache
from quire.models.layers.norm import Norm, make_norm
from quire.models.layers.rotary import RotaryEmbedding

XAndResidual = tuple[Tensor | None, Tensor]
"""What a layer gets and returns: x, not yet added, and residual."""
Sum = Callable[[Any, Tensor], Tensor]
"""From x and residual [num_tokens, hidden]: adds x to residual, unless x is None, and returns the norm of residual, or
residual itself if there is no norm."""


def summing(norm: Norm | None, *, has_x: bool) -> Sum:
    """The function for a norm, and for an x that is never None (has_x) or always."""
    if norm is None:
        return _add if has_x else lambda _, residual: residual
    return norm.add if has_x else lambda _, residual: norm(residual)


def _add(x: Tensor, residual: Tensor) -> Tensor:
    kernels.add(x, residual)
    return residual


def _make_attention(
    shape: AttentionShape | LatentAttentionShape, hidden_size: int, dtype: torch.dtype, rotary: RotaryEmbedding | None
) -> Any:
    """The module that computes it: `forward(x, batch, kv)`, and `write`."""
    if isinstance(shape, AttentionShape):
        return SelfAttention(shape, hidden_size, dtype, rotary)
    assert rotary is not None
    return LatentAttention(shape, hidden_size, dtype, rotary)


class DecoderLayer(nn.Module, ABC):
    """Attention and MLP. The norms and their order are a subclass's."""

    norms: ClassVar[tuple[str, ...]] = "input_layernorm", "post_attention_layernorm"
    """Those of the norms that read x or the residual."""
    output_norms: ClassVar[tuple[str, ...]] = ()
    """Those that read what attention or the MLP gives."""
    returns_x: ClassVar[bool] = True
    """Whether the x that it returns is never None."""
    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm

    def __init__(
        self, shape: LayerShape, hidden_size: int, dtype: torch.dtype, rotary: RotaryEmbedding | None, has_x: bool
    ) -> None:
        """`has_x`: whether the x that it gets is never None."""
        super().__init__()
        self.self_attn = _make_attention(shape.attention, hidden_size, dtype, rotary)
        self.mlp = make_mlp(shape.mlp, hidden_size, dtype)
        of_output = dict.fromkeys(self.output_norms, shape.output_norm or shape.norm)
        for name, norm in (dict.fromkeys(self.norms, shape.norm) | of_output).items():
            setattr(self, name, make_norm(hidden_size, norm))
        self.enter = summing(getattr(self, "input_layernorm", None), has_x=has_x)
        """From x and residual to what attention reads first."""

    @abstractmethod
    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        """x and residual [num_tokens, hidden] -> the same two."""

    def write(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> None:
        """Write to `kv` what `forward` writes, and compute nothing else."""
        self.self_attn.write(self.enter(x, residual), batch, kv)


class PreNormLayer(DecoderLayer):
    """Norms before attention and MLP."""

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        x = self.self_attn(self.enter(x, residual), batch, kv)
        residual, batch = batch.narrowed(residual)
        x = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, batch), residual


class PreNormOfMLPLayer(PreNormLayer):
    """A norm before the MLP alone."""

    norms = ("post_attention_layernorm",)


class ResidualAfterNormLayer(PreNormLayer):
    """Norms before attention and MLP, whose results are added to what the norms gave."""

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        normed = self.enter(x, residual)
        normed_again = self.post_attention_layernorm.add(self.self_attn(normed, batch, kv), normed)
        return self.mlp(normed_again, batch), normed_again


class PostNormLayer(DecoderLayer):
    """Norms of the sums with what attention and MLP give; they become the residual."""

    returns_x = False

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        x = self.self_attn(residual, batch, kv)
        residual, batch = batch.narrowed(residual)
        hidden = self.input_layernorm.add(x, residual)
        return None, self.post_attention_layernorm.add(self.mlp(hidden, batch), hidden)

    def write(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> None:
        self.self_attn.write(residual, batch, kv)


class OutputNormLayer(DecoderLayer):
    """Norms of what attention and MLP give, before it is summed."""

    norms = ()
    output_norms = "post_attention_layernorm", "post_feedforward_layernorm"

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        kernels.add(self.post_attention_layernorm(self.self_attn(self.enter(x, residual), batch, kv)), residual)
        return self.post_feedforward_layernorm(self.mlp(residual, batch)), residual


class SandwichLayer(DecoderLayer):
    """Norms before attention and MLP, and of what they give before it is summed."""

    norms = "input_layernorm", "pre_feedforward_layernorm"
    output_norms = "post_attention_layernorm", "post_feedforward_layernorm"

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        x = self.post_attention_layernorm(self.self_attn(self.enter(x, residual), batch, kv))
        x = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x, batch)), residual


class ParallelLayer(DecoderLayer):
    """One norm, which both attention and MLP read."""

    norms = ("input_layernorm",)

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        normed = self.enter(x, residual)
        attended = self.self_attn(normed, batch, kv)
        return _add(self.mlp(normed, batch), attended), residual


class ParallelTwoNormsLayer(DecoderLayer):
    """Attention and MLP read the same residual, each through its own norm."""

    def forward(self, x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache) -> XAndResidual:
        attended = self.self_attn(self.enter(x, residual), batch, kv)
        return _add(self.mlp(self.post_attention_layernorm(residual), batch), attended), residual


LAYERS: dict[Arrangement, type[DecoderLayer]] = {
    Arrangement.PRE_NORM: PreNormLayer,
    Arrangement.PRE_NORM_OF_MLP: PreNormOfMLPLayer,
    Arrangement.POST_NORM: PostNormLayer,
    Arrangement.OUTPUT_NORM: OutputNormLayer,
    Arrangement.SANDWICH: SandwichLayer,
    Arrangement.PARALLEL: ParallelLayer,
    Arrangement.PARALLEL_TWO_NORMS: ParallelTwoNormsLayer,
    Arrangement.RESIDUAL_AFTER_NORM: ResidualAfterNormLayer,
}
"""The class that computes each arrangement."""
