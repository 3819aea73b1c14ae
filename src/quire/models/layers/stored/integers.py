"""Integers with scales, however a tool packed them: kept as integers by the kernels, without rounding."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import CheckpointError
from quire.kernels import PlacedIntegers
from quire.kernels.backends import reference
from quire.models.layers.stored import pieces
from quire.models.layers.weight_format import WeightFormat, join_specs, kept_once, tensors_of
from quire.models.layers.weighted_layer import Part, WeightSpec


@dataclass(frozen=True, slots=True)
class Numbers:
    """Integers and what they are multiplied with, as kernels.pack_integers takes them."""

    integers: PlacedIntegers
    """[n, k], the columns in the order of their groups."""
    scales: Tensor
    """[n, ranges]; uint8 exponents for MXFP4."""
    zeros: Tensor | None = None
    """uint8 [n, ranges]; None where all are in the middle."""
    order: Tensor | None = None
    """int64 [k]: which input each column is of. None: as they are."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of Numbers with k columns."""

    bits: int
    scale_range: int
    """How many columns share a scale: a multiple of 32, or at least k."""
    scale_dtype: torch.dtype
    has_zeros: bool = False
    is_reordered: bool = False

    def num_bytes(self, n: int, k: int) -> int:
        """The size of a matrix [n, k] as the kernels keep it."""
        format = kernels.integer_format(self.bits, self.scale_dtype, has_zeros=self.has_zeros)
        scale_range = 0 if self.scale_dtype is torch.uint8 else self.scale_range
        return kernels.quantized_bytes(n, k, format, scale_range) + (4 * k if self.is_reordered else 0)

    def without_values(self, n: int, k: int) -> Numbers:
        """Numbers of this form on torch's meta device."""
        ranges = (n, -(-k // self.scale_range))
        zeros = torch.empty(ranges, dtype=torch.uint8, device="meta") if self.has_zeros else None
        scales = torch.empty(ranges, dtype=self.scale_dtype, device="meta")
        return Numbers(PlacedIntegers(scales, self.bits, torch.empty(n), torch.empty(k)), scales, zeros)


class StoredIntegers(ABC):
    """A StoredWeight of integers. Subclasses, which are frozen dataclasses, know how a tool packs them."""

    __slots__ = ()

    @abstractmethod
    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        """As StoredWeight. The part must be a whole matrix."""

    @abstractmethod
    def layout(self, k: int) -> Layout:
        """The form of what `numbers` returns. Raises CheckpointError if there is none for k columns."""

    @abstractmethod
    def numbers(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Numbers:
        """The matrix [n, k]. Raises CheckpointError if the tensors contradict each other or the config."""

    def expand(self, out: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """As StoredWeight."""
        layout, numbers = self.layout(out.shape[1]), _finite(self.numbers(tensors, *out.shape))
        columns = slice(None) if numbers.order is None else numbers.order
        for rows in pieces(out.shape):
            zeros = None if numbers.zeros is None else numbers.zeros[rows]
            integers, scales, mins = reference.split_integers(
                numbers.integers.values(rows), numbers.scales[rows], zeros, layout.bits, layout.scale_range
            )
            weights = integers * scales[..., None]
            weights = weights if mins is None else weights - mins[..., None]
            out[rows, columns] = weights.flatten(1)[:, : out.shape[1]].to(out.dtype)

    def format(self, sizes: tuple[int, ...]) -> WeightFormat:
        """As StoredWeight."""
        return Integers(self, sizes)


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of one or several modules that are stored alike, as one matrix of the kernels."""

    reads_ranges: ClassVar[bool] = False
    stored: StoredIntegers
    sizes: tuple[int, ...]
    """The rows of each module."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        modules = [self.stored.specs(part, dtype) for part in parts]
        return kept_once(join_specs(modules), self.stored.layout(k).num_bytes(n, k))

    def matrix(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> kernels.QuantizedWeight:
        layout = self.stored.layout(shape[1])
        if next(iter(tensors.values())).is_meta:
            modules = [layout.without_values(*shape)]
        else:
            modules = [
                self.stored.numbers(tensors_of(tensors, i, len(self.sizes)), size, shape[1])
                for i, size in enumerate(self.sizes)
            ]
        zeros, order = [each.zeros for each in modules if each.zeros is not None], _common_order(modules)
        return kernels.pack_integers(
            [each.integers for each in modules],
            _stacked([each.scales for each in modules]),
            _stacked(zeros) if zeros else None,
            dtype,
            layout.scale_range,
            None if order is None else order.int(),
        )


def _finite(numbers: Numbers) -> Numbers:
    """The same numbers. Raises CheckpointError if a scale is infinite or a NaN."""
    if numbers.scales.is_floating_point() and not all(bool(end.isfinite()) for end in numbers.scales.aminmax()):
        raise CheckpointError("scales are not finite")
    return numbers


def _stacked(tensors: list[Tensor]) -> Tensor:
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).contiguous()


def _common_order(modules: list[Numbers]) -> Tensor | None:
    """Raises CheckpointError if the orders of the modules' columns differ."""
    orders = [each.order for each in modules if each.order is not None]
    if orders and not (len(orders) == len(modules) and all(torch.equal(order, orders[0]) for order in orders)):
        raise CheckpointError("g_idx differs between projections that share their inputs")
    return orders[0] if orders else None


def order_of(groups: Tensor, size: int, *, may_differ: bool) -> Tensor | None:
    """From the group of each input, [k], the inputs in the order of their groups.

    None if they lie in it, unless they `may_differ` from it: memory for an order was planned then. Raises
    CheckpointError unless each group has `size` inputs.
    """
    in_order = (torch.arange(len(groups)) // size).int()
    if not may_differ and torch.equal(groups, in_order):
        return None
    if not torch.equal(groups.sort().values, in_order):
        raise CheckpointError(f"g_idx must name each group, of {size} inputs, that many times")
    return groups.argsort(stable=True)


def places(count: int, bits: int, words_apart: int = 1, order: Sequence[int] = range(8)) -> Tensor:
    """Where integers begin that fill words of 32 bits, in bits from the start, int64 [count].

    A word lies `words_apart` words behind the one before. `order` says where in it each of its integers is, counted
    from the lowest.
    """
    index, in_word = np.arange(count), 32 // bits
    return torch.from_numpy(index // in_word * (32 * words_apart) + np.array(order)[index % in_word] * bits)
