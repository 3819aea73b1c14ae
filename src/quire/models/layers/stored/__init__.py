"""How checkpoints store the matrix of a module, if not as plain numbers; and plain numbers made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.kernels import Matrix
from quire.models.layers.weight_format import Packed, WeightFormat, join_specs, kept_once, tensors_of
from quire.models.layers.weighted_layer import Part, WeightSpec

_PACKED = Packed()
_PIECE_ELEMENTS = 2**15
"""Weights that are expanded at once: few enough for the caches, and for torch not to wait for its threads."""


class StoredWeight(Protocol):
    """How the matrix [n, k] of one module is stored. It has no state, and equals another that is stored so."""

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        """The tensors to ask the loader for, by their names below the module's. `part` is as in WeightFormat."""

    def expand(self, out: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights that the tensors of `specs` stand for into `out` [n, k], rounded to its dtype."""

    def format(self, sizes: tuple[int, ...]) -> WeightFormat:
        """How a layer keeps such weights. It fuses modules with `sizes` rows, which are all stored so."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of any floating point dtype."""

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        return {"weight": WeightSpec((part,), dtype)}

    def expand(self, out: Tensor, tensors: Mapping[str, Tensor]) -> None:
        out.copy_(tensors["weight"])

    def format(self, sizes: tuple[int, ...]) -> WeightFormat:
        return Packed()


@dataclass(frozen=True, slots=True)
class Expanded:
    """Weights that are made plain numbers when they are loaded, and then kept as `inner` keeps those."""

    reads_ranges: ClassVar[bool] = False
    stored: tuple[StoredWeight, ...]
    """Of each module that the layer fuses."""
    sizes: tuple[int, ...]
    """The rows of each."""
    inner: WeightFormat = _PACKED

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        num_bytes = sum(spec.num_bytes for spec in self.inner.specs(parts, dtype).values())
        modules = [stored.specs(part, dtype) for stored, part in zip(self.stored, parts, strict=True)]
        return kept_once(join_specs(modules), num_bytes)

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        weight, start = torch.empty(shape, dtype=dtype, device=next(iter(tensors.values())).device), 0
        if not weight.is_meta:  # of a meta model, only sizes are asked for
            for i, (stored, size) in enumerate(zip(self.stored, self.sizes, strict=True)):
                stored.expand(weight[start : start + size], tensors_of(tensors, i, len(self.stored)))
                start += size
        return self.inner.matrix({"weight": weight}, shape, dtype)


def pieces(shape: tuple[int, ...]) -> list[slice]:
    """Ranges of a matrix's rows that are small enough to be expanded at once."""
    num_rows = max(1, _PIECE_ELEMENTS // max(1, shape[1]))
    return [slice(start, start + num_rows) for start in range(0, shape[0], num_rows)]
