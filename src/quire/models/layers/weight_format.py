"""How a layer keeps a matrix it multiplies by: in the dtype it computes in, or quantized."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.weighted_layer import Part, WeightSpec

Matrix = kernels.PackedWeight | kernels.QuantizedWeight
"""What kernels.matmul multiplies by."""


class WeightFormat(Protocol):
    """From one or several tensors of a checkpoint to the kernel's matrix. Layers hold a format; it has no state.

    `parts` are the ranges of the matrices [n, k] that the layer stacks, as if they were stored plainly. A format whose
    tensors have other shapes (packed integers, a scale for each group) states which of their ranges correspond.
    """

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        """The tensors to ask the loader for, by their names in the checkpoint below the layer's, such as `weight`."""

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """The matrix [n, k] of `shape`, for x of `dtype`, from the tensors that `specs` asked for."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Every bit of the weight, in the dtype it computes in."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        return {"weight": WeightSpec(parts, dtype)}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.pack_weight(tensors["weight"])


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized when it is loaded."""

    format: str
    """One of kernels.QUANTIZED_FORMATS."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        return {"weight": WeightSpec(parts, dtype, kept_bytes=kernels.quantized_bytes(n, k, self.format))}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.quantize_weight(tensors["weight"], self.format)


@dataclass(frozen=True, slots=True)
class SavedQuantized:
    """Quantized and stacked already: mapped from the file, as it lies there. It cannot be split into ranges."""

    format: str

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        num_bytes = kernels.quantized_bytes(n, k, self.format)
        return {"weight": WeightSpec((Part((num_bytes,)),), torch.uint8, kept=True)}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.mapped_weight(*shape, dtype, self.format, tensors["weight"])
