"""Weights in the layout that a backend's kernels read."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.checks import refusal

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
_ALL = slice(None)


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


class HeadWeights:
    """A matrix [n, k] for each head, as `pack_heads` lays them out: packed ones, one behind the other, or on the
    reference backend the matrices themselves [num_heads, n, k]."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, data: Tensor) -> None:
        """`shape` is [num_heads, n, k]."""
        self.num_heads, self.n, self.k = shape
        self.dtype, self.data = dtype, data
        self.address = 0 if data.is_meta else data.data_ptr()


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
    in_file: bool = False
    """Whether `data` is of a mapped file whose pages there may be no memory for."""

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        parts = (self.data, self.order, self.scales, self.mins, self.factors)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedIntegers:
    """Integers [n, k] of 4 or 8 bits, wherever in a tensor a tool has put them.

    That of row i and column j begins `rows[i] + columns[j]` bits from the start. It lies inside of a byte.
    """

    data: Tensor
    """Contiguous, of any dtype."""
    bits: int
    rows: Tensor
    """int64 [n], contiguous"""
    columns: Tensor
    """int64 [k], contiguous"""

    @classmethod
    def in_bytes(cls, integers: Tensor, bits: int) -> "PlacedIntegers":
        """Those of uint8 [n, k], contiguous, one in each byte."""
        n, k = integers.shape
        return cls(integers, bits, torch.arange(n) * 8 * k, torch.arange(k) * 8)

    def in_order(self, order: Tensor) -> "PlacedIntegers":
        """The columns that `order` [k] names."""
        return dataclasses.replace(self, columns=self.columns[order])

    def values(self, rows: slice = _ALL) -> Tensor:
        """The integers of some rows, uint8 [rows, k]."""
        places = self.rows[rows].numpy()[:, None] + self.columns.numpy()  # torch would wait for its threads
        parts = self.data.reshape(-1).view(torch.uint8).numpy()[places >> 3]
        return torch.from_numpy(parts >> (places & 7).astype(np.uint8) & np.uint8(2**self.bits - 1))

    def are_inside(self) -> bool:
        """Whether each integer is in the tensor, and inside of a byte."""
        if self.data.is_meta or not self.rows.numel() or not self.columns.numel():
            return True
        (first, last), (left, right) = self.rows.aminmax(), self.columns.aminmax()
        is_whole = not any(bool((places % self.bits).any()) for places in (self.rows, self.columns))
        return is_whole and int(first) + int(left) >= 0 and int(last) + int(right) + self.bits <= 8 * self.data.nbytes


class StackedWeight:
    """Weights [n_i, k] of different formats, one below the other: a weight [sum of n_i, k]."""

    def __init__(self, parts: tuple[PackedWeight | QuantizedWeight, ...]) -> None:
        if len({(part.k, part.dtype, part.data.device) for part in parts}) != 1:
            given = [(part.n, part.k, part.dtype, part.data.device) for part in parts]
            raise refusal("StackedWeight", "parts [n, k], at least one, of one k, dtype and device", parts=given)
        self.parts, self.n = parts, sum(part.n for part in parts)
        self.k, self.dtype = parts[0].k, parts[0].dtype
        self.data = parts[0].data
        """What the first part keeps; all parts are on its device."""

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return sum(part.nbytes for part in self.parts)


Matrix = PackedWeight | QuantizedWeight | StackedWeight
"""What `kernels.matmul` multiplies by."""

Factors = tuple[Tensor, Tensor]
"""Of an adapter: A [rank, k] and B [n, rank] of a module, the scale being part of B."""
MAX_LORA_MODULES = 3
"""How many modules a projection with adapters may fuse."""


@dataclass(frozen=True, slots=True, eq=False)
class LoRAWeight:
    """One adapter's matrices for a projection, as `pack_lora` lays them out."""

    sizes: tuple[int, ...]
    """The outputs of each module that the projection fuses."""
    k: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    """The rank in each module; 0 where the adapter leaves the module as it is."""
    a: Tensor
    """All modules' A, one below the other. Native: in fours of rows, [fours, lines, 4, 64 bytes along k], padded."""
    b: tuple[Tensor, ...]
    """Each module's B. Native: [panels of 32 outputs, rank, 32]; else [n, rank]."""

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return self.a.nbytes + sum(part.nbytes for part in self.b)


class LoRATable:
    """The adapters of one projection, by slot. It owns their memory; `put` replaces one.

    `entries` stays in place and is read whenever `add_lora` runs, also in a recording. Rows of a step must not name a
    slot that is being replaced.
    """

    def __init__(self, sizes: tuple[int, ...], k: int, dtype: torch.dtype, num_slots: int, max_rank: int) -> None:
        self.sizes, self.k, self.dtype, self.max_rank = sizes, k, dtype, max_rank
        self.most_ranks = -(-len(sizes) * max_rank // 4) * 4
        """The rows of the largest A of an adapter."""
        self.weights: list[LoRAWeight | None] = [None] * num_slots
        self.entries = torch.zeros(num_slots, 2 + 2 * MAX_LORA_MODULES, dtype=torch.int64)
        """[num_slots, 8]: LoraEntry of csrc/base/kernel_table.h"""
        self.address = self.entries.data_ptr()

    def work_bytes(self, rows: int) -> int:
        """The memory that `add_lora` computes in: LoraArgs::work of csrc/base/kernel_table.h."""
        return 4 * (len(self.weights) + rows * (4 + self.most_ranks))

    def put(self, slot: int, weight: LoRAWeight | None) -> None:
        """Put an adapter's part into a slot; None: it has none, or the slot becomes free."""
        entry = [0] * self.entries.shape[1]
        if weight is not None:
            if (weight.sizes, weight.k, weight.dtype) != (self.sizes, self.k, self.dtype) or (
                max(weight.ranks) > self.max_rank
            ):
                takes = f"an adapter of {self.sizes}, {self.k}, {self.dtype} and ranks up to {self.max_rank}"
                raise refusal("LoRATable", takes, sizes=weight.sizes, k=weight.k, ranks=weight.ranks)
            entry[:2] = weight.a.data_ptr(), -(-sum(weight.ranks) // 4) * 4
            for i, (b, rank) in enumerate(zip(weight.b, weight.ranks, strict=True)):
                entry[2 + 2 * i : 4 + 2 * i] = b.data_ptr(), rank
        self.entries[slot] = torch.tensor(entry)
        self.weights[slot] = weight
