"""Floating point numbers of 8 and 4 bits with scales."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.common.errors import CheckpointError
from quire.kernels import PlacedIntegers
from quire.models.layers.stored import Expanded, pieces
from quire.models.layers.stored.integers import Layout, Numbers, StoredIntegers
from quire.models.layers.weight_format import WeightFormat
from quire.models.layers.weighted_layer import Part, WeightSpec

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The number that each byte stands for."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Numbers E4M3 in `weight`, which are multiplied with their scales in float32 and kept as plain numbers."""

    block: tuple[int, int]
    """The rows and columns that share a scale; 0 for all of them."""
    scale_name: str
    scale_dtype: torch.dtype
    scale_shape: tuple[int, ...] | None
    """The shape of the only scale, () or (1,); None if there are more."""
    input_scale_shape: tuple[int, ...] | None
    """That of `input_scale`, with which inputs would be rounded. It is not used. None: it is absent."""

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = part.shape
        scales = self.scale_shape if self.scale_shape is not None else self._grid(n, k)
        specs = {
            "weight": WeightSpec((part,), torch.float8_e4m3fn),
            self.scale_name: WeightSpec((Part(scales),), self.scale_dtype),
        }
        if self.input_scale_shape is not None:
            specs["input_scale"] = WeightSpec((Part(self.input_scale_shape),), torch.float32)
        return specs

    def expand(self, out: Tensor, tensors: Mapping[str, Tensor]) -> None:
        n, k = out.shape
        grid = tensors[self.scale_name].float().expand(self._grid(n, k))
        of_row, columns = torch.arange(n) // (self.block[0] or n), self.block[1] or k
        for rows in pieces(out.shape):
            numbers = tensors["weight"][rows].reshape(-1).view(torch.uint8)
            scales = grid[of_row[rows]]
            if scales.shape[1] > 1:
                scales = scales.repeat_interleave(columns, 1)[:, :k]
            values = _E4M3.index_select(0, numbers.int()).view(-1, k) * scales  # torch converts slowly
            if not all(bool(end.isfinite()) for end in values.aminmax()):
                raise CheckpointError("weights or scales are not finite")
            out[rows].copy_(values)

    def format(self, sizes: tuple[int, ...]) -> WeightFormat:
        return Expanded((self,) * len(sizes), sizes)

    def _grid(self, n: int, k: int) -> tuple[int, int]:
        return -(-n // (self.block[0] or n)), -(-k // (self.block[1] or k))


@dataclass(frozen=True, slots=True)
class Float4(StoredIntegers):
    """MXFP4 (Open Compute Project, Microscaling Formats 1.0): two numbers E2M1 in a byte, and an exponent for each 32.

    The kernels multiply by them as they are.
    """

    weight_name: str
    scale_name: str
    is_in_blocks: bool
    """Whether the weight is [n, k / 32, 16], and not [n, k / 2]."""

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = part.shape
        if k % 32:
            raise CheckpointError(f"{k} inputs are not whole groups of 32: the config has another shape")
        weight = (n, k // 32, 16) if self.is_in_blocks else (n, k // 2)
        return {
            self.weight_name: WeightSpec((Part(weight),), torch.uint8),
            self.scale_name: WeightSpec((Part((n, k // 32)),), torch.uint8),
        }

    def layout(self, k: int) -> Layout:
        return Layout(4, 32, torch.uint8)

    def numbers(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Numbers:
        scales = tensors[self.scale_name]
        if bool((scales == 255).any()):
            raise CheckpointError(f"{self.scale_name} holds exponents 255, which stand for NaN")
        rows, columns = torch.arange(n) * (4 * k), torch.arange(k) * 4
        return Numbers(PlacedIntegers(tensors[self.weight_name], 4, rows, columns), scales)
