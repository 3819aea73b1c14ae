"""Weights in the layout that a backend's kernels read."""

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTIZED_FORMATS = ("int8", "int4")
"""The formats of quantized weights. A format's index here is its number in csrc/quantized/layout.h."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [n, k] as `pack_weight` lays it out. The native layout is the same for every ISA variant of one build.

    `data` is what the backend keeps: the packed bytes, or the weight itself [n, k] on the reference backend.
    """

    n: int
    k: int
    dtype: torch.dtype
    data: Tensor
    address: int
    """`data.data_ptr()`, which is slow to ask for in every call."""

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [n, k] as integers and scales. The native layout is the same for every ISA variant and machine.

    `data` is uint8 and holds integers and scales, except on the reference backend: there it holds the integers
    [n, num_groups, group] int8, and `scales` [n, num_groups] float32 stand beside it.
    """

    n: int
    k: int
    dtype: torch.dtype
    """The dtype of the weight that was quantized, and of the rows that the weight is multiplied with."""
    format: str
    """One of QUANTIZED_FORMATS."""
    data: Tensor
    address: int
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
