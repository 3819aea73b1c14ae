"""Weights in the layout that a backend's kernels read."""

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTIZED_FORMATS = ("int8", "int4")
"""The formats that `quantize_weight` makes of other weights."""
BLOCK_FORMATS = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip
"""The formats of ggml's blocks, of which `pack_blocks` makes weights."""
INTEGER_FORMATS = tuple(
    f"u{bits}_{scale}{zeros}" for bits in (4, 8) for scale in ("half", "bfloat", "float") for zeros in ("", "_zeros")
)
"""Integers of 4 or 8 bits with a scale for each of some range along k, in float16, bfloat16 or float32, and with a zero
point beside it or the zero 8 or 128: what `pack_integers` takes besides `mxfp4`."""
FORMATS = (*QUANTIZED_FORMATS, *BLOCK_FORMATS, *INTEGER_FORMATS)
"""All formats of quantized weights. A format's index here is its number in csrc/quantized/layout.h."""


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

    A weight is integer * scale - min. `data` is uint8 and holds all of them, except on the reference backend: there it
    holds the integers [n, num_groups, group] int16, and `scales` and `mins` [n, num_groups] float32 and `factors` stand
    beside it.
    """

    n: int
    k: int
    dtype: torch.dtype
    """The dtype of the weight that was quantized, and of the rows that the weight is multiplied with."""
    format: str
    """One of FORMATS."""
    data: Tensor
    address: int
    scale_range: int = 0
    """How many k share a scale, for INTEGER_FORMATS, which leave it open: a multiple of 32, or at least k. 0 for the
    others."""
    order: Tensor | None = None
    """int32 [k]: the columns of x that the weight's columns are multiplied with, in their order. None: as they are."""
    scales: Tensor | None = None
    mins: Tensor | None = None
    factors: Tensor | None = None
    """float32 [k]: what x is multiplied with before it is rotated (reference_rotation), for `int8`."""

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        parts = (self.data, self.order, self.scales, self.mins, self.factors)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Weights [n_i, k] of different formats, one below the other: a weight [sum of n_i, k]."""

    parts: tuple[PackedWeight | QuantizedWeight, ...]

    @property
    def n(self) -> int:
        """Rows of all parts."""
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        """Columns."""
        return self.parts[0].k

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that the weight is multiplied with."""
        return self.parts[0].dtype

    @property
    def data(self) -> Tensor:
        """What the first part keeps; all parts are on its device."""
        return self.parts[0].data

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return sum(part.nbytes for part in self.parts)


Matrix = PackedWeight | QuantizedWeight | StackedWeight
"""What `kernels.matmul` multiplies by."""
