"""How a layer keeps a matrix it multiplies by: in the dtype it computes in, or quantized."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.weighted_layer import WeightSpec

Matrix = kernels.PackedWeight | kernels.QuantizedWeight
"""what kernels.matmul multiplies by"""


class WeightFormat(Protocol):
    """Between the tensors of a checkpoint and the kernel's matrix. Layers hold one; it keeps nothing itself."""

    def spec(self, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> WeightSpec:
        """What to ask the loader for, to make a matrix of these stacked parts for x of `dtype`."""

    def matrix(self, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """The matrix [n, k] of `shape`, from what the spec asked for."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Every bit of the weight, in the dtype it computes in."""

    def spec(self, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> WeightSpec:
        return WeightSpec(parts, dtype)

    def matrix(self, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.pack_weight(weight)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized when it is loaded."""

    format: str
    """one of kernels.QUANTIZED_FORMATS"""

    def spec(self, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> WeightSpec:
        num_rows = sum(n for n, _ in parts)
        return WeightSpec(parts, dtype, kept_bytes=kernels.quantized_bytes(num_rows, parts[0][1], self.format))

    def matrix(self, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.quantize_weight(weight, self.format)


@dataclass(frozen=True, slots=True)
class SavedQuantized:
    """Quantized and stacked already: mapped from the file, as it lies there."""

    format: str

    def spec(self, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> WeightSpec:
        num_bytes = kernels.quantized_bytes(sum(n for n, _ in parts), parts[0][1], self.format)
        return WeightSpec(((num_bytes,),), torch.uint8, kept=True)

    def matrix(self, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.mapped_weight(*shape, dtype, self.format, weight)
