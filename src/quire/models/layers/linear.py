"""Matrix multiplications, by weights in the format that a pass over modules chose (as they are, unless one did)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.weight_format import Packed, WeightFormat
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec


class Projection(WeightedLayer):
    """A matrix [n, k] and a bias. A pass may replace `format` and narrow `parts` before the weights are loaded."""

    weight: kernels.Matrix
    is_quantizable: ClassVar[bool] = True
    """Whether passes may set a format other than plain numbers, or those that are made of stored ones."""

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        is_transposed: bool = False,
        blocks: tuple[int, ...] | None = None,
    ) -> None:
        """`is_transposed` and `blocks`: how the checkpoint has the matrix, as Part says."""
        super().__init__()
        sizes = (out_features,) if isinstance(out_features, int) else out_features
        shapes = ((in_features, n) if is_transposed else (n, in_features) for n in sizes)
        self.parts = tuple(Part(shape, is_transposed=is_transposed, blocks=blocks) for shape in shapes)
        self.dtype = dtype
        self.format: WeightFormat = Packed()
        self.has_bias = bias
        self.bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The rows n and columns k of the matrix."""
        return sum(part.size[0] for part in self.parts), self.parts[0].size[1]

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        specs = self.format.specs(self.parts, self.dtype)
        if not self.has_bias:
            return specs
        parts = tuple(Part(part.arranged_shape[:1], part.rows, blocks=part.blocks) for part in self.parts)
        return {**specs, "bias": WeightSpec(parts, torch.float32)}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = self.format.matrix(tensors, self.shape, self.dtype)
        if self.has_bias:
            self.bias = tensors["bias"].clone()  # [n]


class Linear(Projection):
    """`x @ weight.T + bias`. Several `out_features` make one matrix of projections that a checkpoint keeps apart.

    A pass may set `adapters`: then the rows that name an adapter in the batch have what it adds.
    """

    adapters: kernels.LoRATable | None = None
    takes_adapters = True
    """Whether adapters may have factors for it."""

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, sum(out_features)]; row i is of the batch's token i."""
        out = kernels.matmul(x, self.weight, self.bias)
        if self.adapters is not None and batch.adapters is not None:
            kernels.add_lora(x, out, self.adapters, batch.adapters)
        return out


class ScaledLinear(Linear):
    """A Linear whose result is multiplied by a number, after what adapters add."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        multiplier: float,
        *,
        bias: bool,
        dtype: torch.dtype,
        is_transposed: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, is_transposed=is_transposed)
        self.multiplier = multiplier

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """As Linear."""
        out = super().forward(x, batch)
        kernels.scale(out, self.multiplier)
        return out


class ClippedLinear(Linear):
    """A Linear whose result is clipped to [-limit, limit], after what adapters add."""

    def __init__(
        self,
        limit: float,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        is_transposed: bool = False,
        blocks: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, is_transposed=is_transposed, blocks=blocks)
        self.limit = limit

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """As Linear."""
        out = super().forward(x, batch)
        kernels.clip(out, self.limit)
        return out


def output_linear(
    in_features: int, out_features: int, multiplier: float, *, bias: bool, dtype: torch.dtype, is_transposed: bool
) -> Linear:
    """A ScaledLinear if there is something to multiply by, and else a Linear."""
    if multiplier == 1.0:
        return Linear(in_features, out_features, bias=bias, dtype=dtype, is_transposed=is_transposed)
    return ScaledLinear(in_features, out_features, multiplier, bias=bias, dtype=dtype, is_transposed=is_transposed)


class LmHead(Projection):
    """The projection to the vocabulary; its result is float32 whatever the model computes in."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__(hidden_size, vocab_size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, hidden] -> logits [num_rows, vocab] float32."""
        return kernels.matmul(x, self.weight, self.bias, torch.float32)


class NormalizedLmHead(LmHead):
    """A head whose rows are divided by their lengths (Baichuan 2), before a format is made of them."""

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"]
        if weight.is_floating_point() and not weight.is_meta:
            lengths = torch.linalg.vector_norm(weight, dim=1, keepdim=True, dtype=torch.float32)  # [vocab, 1]
            tensors = {**tensors, "weight": (weight / lengths.clamp_(min=1e-12)).to(weight.dtype)}
        super().set_weights(tensors)
