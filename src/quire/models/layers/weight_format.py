"""How a layer keeps a matrix it multiplies by: in the dtype it computes in, or quantized."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire import kernels
from quire.config.parallel import Range
from quire.kernels import Matrix
from quire.models.layers.weighted_layer import Part, WeightSpec


class WeightFormat(Protocol):
    """From one or several tensors of a checkpoint to the kernel's matrix. Layers hold a format; it has no state.

    `parts` are the ranges of the matrices [n, k] that the layer stacks, as if they were stored plainly. A format whose
    tensors have other shapes (packed integers, a scale for each group) states which of their ranges correspond.
    """

    @property
    def reads_ranges(self) -> bool:
        """Whether parts may be ranges of rows, whose bits do not depend on the other rows."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        """The tensors to ask the loader for, by their names in the checkpoint below the layer's, such as `weight`."""

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """The matrix [n, k] of `shape`, for x of `dtype`, from the tensors that `specs` asked for."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Every bit of the weight, in the dtype it computes in."""

    reads_ranges: ClassVar[bool] = True

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        return {"weight": WeightSpec(parts, dtype)}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.pack_weight(tensors["weight"])


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized when it is loaded."""

    format: str
    """One of kernels.QUANTIZED_FORMATS."""

    @property
    def reads_ranges(self) -> bool:
        """As WeightFormat: int8's factors are of all rows."""
        return self.format != "int8"

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        return {"weight": WeightSpec(parts, dtype, kept_bytes=kernels.quantized_bytes(n, k, self.format))}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.quantize_weight(tensors["weight"], self.format)


class Placement(Enum):
    """Where a matrix is kept that a file has in the kernels' layout."""

    MAPPED = "mapped"
    """In the pages of the file, for which there is memory."""
    COPIED = "copied"
    """In memory of the process."""
    IN_FILE = "in file"
    """In the file, of which the system's page cache keeps what it has memory for."""


@dataclass(frozen=True, slots=True)
class SavedQuantized:
    """Quantized and stacked already, in a file as the kernels read it."""

    reads_ranges: ClassVar[bool] = False
    format: str
    placement: Placement = Placement.MAPPED

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        num_bytes = kernels.quantized_bytes(n, k, self.format)
        return {"weight": WeightSpec((Part((num_bytes,)),), torch.uint8, kept=self.placement is not Placement.COPIED)}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        data, is_copied = tensors["weight"], self.placement is Placement.COPIED
        weight = kernels.mapped_weight(*shape, dtype, self.format, kernels.weight_copy(data) if is_copied else data)
        return dataclasses.replace(weight, in_file=self.placement is Placement.IN_FILE)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A format for each of the modules that a layer fuses."""

    reads_ranges: ClassVar[bool] = False
    formats: tuple[WeightFormat, ...]
    sizes: tuple[int, ...]
    """The rows of each."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        return join_specs([format.specs((part,), dtype) for part, format in zip(parts, self.formats, strict=True)])

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        made: list[kernels.PackedWeight | kernels.QuantizedWeight] = []
        for i, (format, size) in enumerate(zip(self.formats, self.sizes, strict=True)):
            part = format.matrix(tensors_of(tensors, i, len(self.formats)), (size, shape[1]), dtype)
            assert not isinstance(part, kernels.StackedWeight)
            made.append(part)
        return kernels.StackedWeight(tuple(made))


def specs_of_ranges(
    format: WeightFormat, parts: tuple[Part, ...], kept: Sequence[Range] | None, dtype: torch.dtype
) -> Mapping[str, WeightSpec]:
    """What to ask the loader for where a layer keeps these ranges of the stack's rows; None: all."""
    if kept is None:
        return format.specs(parts, dtype)
    if format.reads_ranges:
        own, modules = ranges_of(parts, kept)
        return {name: dataclasses.replace(spec, modules=modules) for name, spec in format.specs(own, dtype).items()}
    share = sum(end - start for start, end in kept) / sum(part.size[0] for part in parts)
    return {
        name: dataclasses.replace(spec, kept=False, kept_bytes=int(spec.num_bytes * share))
        for name, spec in format.specs(parts, dtype).items()
    }


def matrix_of_ranges(
    format: WeightFormat,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    kept: Sequence[Range] | None,
    dtype: torch.dtype,
) -> Matrix:
    """These ranges of the rows of a matrix of `shape`, from the tensors of `specs_of_ranges`; None: all."""
    if kept is None:
        return format.matrix(tensors, shape, dtype)
    if format.reads_ranges:
        return format.matrix(tensors, (sum(end - start for start, end in kept), shape[1]), dtype)
    return kernels.take_rows(format.matrix(tensors, shape, dtype), kept)


def ranges_of(parts: Sequence[Part], kept: Sequence[Range]) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """The parts of which ranges of the stack's rows consist, and the index of the part that each is of. Parts without
    such rows come last, with none."""
    own, modules = list[Part](), list[int]()
    for start, end in kept:
        first = 0
        for module, part in enumerate(parts):
            last = first + part.size[0]
            if start < last and end > first:
                own.append(dataclasses.replace(part, rows=(max(start, first) - first, min(end, last) - first)))
                modules.append(module)
            first = last
    without = [module for module in range(len(parts)) if module not in modules]
    own += [dataclasses.replace(parts[module], rows=(0, 0)) for module in without]
    return tuple(own), (*modules, *without)


def join_specs(modules: Sequence[Mapping[str, WeightSpec]]) -> dict[str, WeightSpec]:
    """The specs of each module that a layer fuses, under their names and the module's index; of one module as given."""
    if len(modules) == 1:
        return dict(modules[0])
    return {
        f"{name}.{i}": dataclasses.replace(spec, module=i)
        for i, specs in enumerate(modules)
        for name, spec in specs.items()
    }


def tensors_of(tensors: Mapping[str, Tensor], module: int, num_modules: int) -> Mapping[str, Tensor]:
    """The tensors of one of the modules whose specs `join_specs` joined, under its own names."""
    if num_modules == 1:
        return tensors
    end = f".{module}"
    return {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}


def kept_once(specs: Mapping[str, WeightSpec], num_bytes: int) -> dict[str, WeightSpec]:
    """The specs of tensors of which one matrix of `num_bytes` is made and kept."""
    first = next(iter(specs))
    return {
        name: dataclasses.replace(spec, kept_bytes=num_bytes if name == first else 0) for name, spec in specs.items()
    }
