"""Matrix multiplications, by weights in the format that a pass over modules chose (as they are, unless one did)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from quire import kernels
from quire.config.parallel import Range
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.weight_format import Packed, WeightFormat, matrix_of_ranges, ranges_of, specs_of_ranges
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec

Change = Callable[[Tensor], None]
"""Changes a tensor element by element, in place."""


def scaled_by(multiplier: float) -> tuple[Change, ...]:
    """The change that multiplies by a number; none for 1."""
    return () if multiplier == 1.0 else (partial(kernels.scale, factor=multiplier),)


class Projection(WeightedLayer):
    """A matrix [n, k] and a bias. A pass may replace `format`, and set `kept`, before the weights are loaded."""

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
        self.kept: tuple[Range, ...] | None = None
        """The ranges of rows, of all parts stacked, that this rank has. None: all."""

    @property
    def whole_shape(self) -> tuple[int, int]:
        """The rows and columns of the matrix that all ranks have together."""
        return sum(part.size[0] for part in self.parts), self.parts[0].size[1]

    @property
    def shape(self) -> tuple[int, int]:
        """The rows n and columns k of the matrix."""
        n, k = self.whole_shape
        return n if self.kept is None else sum(end - start for start, end in self.kept), k

    def kept_of_parts(self) -> list[list[Range]]:
        """For each part, the ranges of its rows that this rank has."""
        own, modules = ranges_of(self.parts, self.kept or ((0, self.whole_shape[0]),))
        return [
            [part.rows for part, of in zip(own, modules, strict=True) if of == module and part.rows is not None]
            for module in range(len(self.parts))
        ]

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The rows of each part that this rank has."""
        return tuple(sum(end - start for start, end in ranges) for ranges in self.kept_of_parts())

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        specs = specs_of_ranges(self.format, self.parts, self.kept, self.dtype)
        if not self.has_bias:
            return specs
        own, modules = (self.parts, None) if self.kept is None else ranges_of(self.parts, self.kept)
        parts = tuple(Part(part.arranged_shape[:1], part.rows, blocks=part.blocks) for part in own)
        return {**specs, "bias": WeightSpec(parts, torch.float32, modules=modules)}

    def matrix_of(self, tensors: Mapping[str, Tensor]) -> kernels.Matrix:
        """The matrix of `shape`, from the tensors of `weight_specs`."""
        return matrix_of_ranges(self.format, tensors, self.whole_shape, self.kept, self.dtype)

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = self.matrix_of(tensors)
        if self.has_bias:
            self.bias = tensors["bias"].clone()  # [n]


class Linear(Projection):
    """`x @ weight.T + bias`. Several `out_features` make one matrix of projections that a checkpoint keeps apart.

    A pass may set `adapters`: then the rows that name an adapter in the batch have what it adds. Another one may set
    `gather_in` and `gather_out`, which put together what each rank has of x and of the result.
    """

    adapters: kernels.LoRATable | None = None
    takes_adapters = True
    """Whether adapters may have factors for it."""
    changes: tuple[Change, ...] = ()
    """What is done to the result, after what adapters add."""
    gather_in: kernels.Gather | None = None
    gather_out: kernels.Gather | None = None

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, sum(out_features)]; row i is of the batch's token i."""
        if self.gather_in is not None:
            x = self.gather_in(x)
        out = self._product(x, batch)
        return out if self.gather_out is None else self.gather_out(out)

    def activated(self, x: Tensor, activated: kernels.Activated, batch: BatchTensors) -> Tensor:
        """As `forward` of what an activation makes of x, [num_tokens, in_features] or, if it is gated, twice as wide.

        The product by a quantized matrix makes it of each row by itself. Ranks and adapters need it in memory; then x,
        to which the caller keeps no reference, is freed before the product.
        """
        is_alone = self.gather_in is None and (self.adapters is None or batch.adapters is None)
        if is_alone and isinstance(self.weight, kernels.QuantizedWeight):
            out = self._product(x, batch, activated)
        else:
            place = None
            if not activated.is_gated:
                x = kernels.activation(x, activated.kind)
            else:
                if self.gather_in is not None:  # the product reads the place before ranks gather its results: no wait
                    place = self.gather_in.place(len(x), x.dtype, waits=False)
                x = kernels.gated_activation(x, activated.kind, place)
            if self.gather_in is not None:
                x = self.gather_in(x) if place is None else self.gather_in.placed(len(x), x.dtype)
            out = self._product(x, batch)
        return out if self.gather_out is None else self.gather_out(out)

    def _product(self, x: Tensor, batch: BatchTensors, activated: kernels.Activated | None = None) -> Tensor:
        """The columns that this rank has, [num_tokens, n], of the whole x, or of what an activation makes of it."""
        if activated is not None:
            assert isinstance(self.weight, kernels.QuantizedWeight)
            out = kernels.activated_matmul(x, activated, self.weight, self.bias)
        else:
            out = kernels.matmul(x, self.weight, self.bias)
            if self.adapters is not None and batch.adapters is not None:
                kernels.add_lora(x, out, self.adapters, batch.adapters)
        for change in self.changes:
            change(out)
        return out


class LmHead(Projection):
    """The projection to the vocabulary; its result is float32 whatever the model computes in."""

    gather_out: kernels.Gather | None = None
    """Gives the first rank the logits of all."""
    changes: tuple[Change, ...] = ()
    """What is done to the logits."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__(hidden_size, vocab_size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, hidden] -> logits [num_rows, vocab] float32."""
        return multiply_to_logits(x, self.weight, self.bias, self.changes, self.gather_out)


def multiply_to_logits(
    x: Tensor,
    matrix: kernels.Matrix,
    bias: Tensor | None,
    changes: Sequence[Change],
    gather: kernels.Gather | None,
) -> Tensor:
    """x [num_rows, hidden] -> logits [num_rows, vocab] float32, and `changes` made to them. With `gather`, the matrix
    is a part of the whole one, and the first rank gets all logits."""
    place = None if gather is None else gather.place(len(x))
    out = kernels.matmul(x, matrix, bias, torch.float32, out=place)
    for change in changes:
        for part in [out] if out.is_contiguous() else [out[row] for row in range(len(out))]:
            change(part)
    if gather is None:
        return out
    return gather(out) if place is None else gather.placed(len(x))


class NormalizedLmHead(LmHead):
    """A head whose rows are divided by their lengths (Baichuan 2), before a format is made of them."""

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"]
        if weight.is_floating_point() and not weight.is_meta:
            lengths = torch.linalg.vector_norm(weight, dim=1, keepdim=True, dtype=torch.float32)  # [vocab, 1]
            tensors = {**tensors, "weight": (weight / lengths.clamp_(min=1e-12)).to(weight.dtype)}
        super().set_weights(tensors)
