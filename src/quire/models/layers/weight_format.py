"""How a layer keeps a matrix it multiplies by: in the dtype it computes in, or quantized."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import CheckpointError
from quire.kernels import Matrix
from quire.kernels.backends import reference_blocks
from quire.models.layers.weighted_layer import Part, WeightSpec


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


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a GGUF file, with the values that they have there. The kernels multiply by them as they are."""

    block_type: str

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        stored = tuple(in_blocks(part, self.block_type) for part in parts)
        return {"weight": WeightSpec(stored, torch.uint8, kept_bytes=kernels.quantized_bytes(n, k, self.block_type))}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.pack_blocks(tensors["weight"], shape[1], dtype, self.block_type)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A format for each of the modules that a layer fuses."""

    formats: tuple[WeightFormat, ...]
    sizes: tuple[int, ...]
    """The rows of each."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        return {
            f"{name}.{i}": dataclasses.replace(spec, module=i)
            for i, (part, format) in enumerate(zip(parts, self.formats, strict=True))
            for name, spec in format.specs((part,), dtype).items()
        }

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        made: list[kernels.PackedWeight | kernels.QuantizedWeight] = []
        for i, (format, size) in enumerate(zip(self.formats, self.sizes, strict=True)):
            own = {name.removesuffix(f".{i}"): tensor for name, tensor in tensors.items() if name.endswith(f".{i}")}
            part = format.matrix(own, (size, shape[1]), dtype)
            assert not isinstance(part, kernels.StackedWeight)
            made.append(part)
        return kernels.StackedWeight(tuple(made))


@dataclass(frozen=True, slots=True)
class Expanded:
    """Blocks of a GGUF file, made plain numbers when they are loaded, and then kept as `inner` keeps those.

    The modules that a layer fuses may have different types of blocks, or none.
    """

    block_types: tuple[str | None, ...]
    """Of each part; None for plain numbers."""
    inner: WeightFormat = Packed()

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        kept_bytes = sum(spec.num_bytes for spec in self.inner.specs(parts, dtype).values())
        specs = {}
        for i, (part, block_type) in enumerate(zip(parts, self.block_types, strict=True)):
            stored = part if block_type is None else in_blocks(part, block_type)
            stored_dtype = dtype if block_type is None else torch.uint8
            kept = kept_bytes if i == 0 else 0
            specs[f"weight.{i}"] = WeightSpec((stored,), stored_dtype, kept_bytes=kept, module=i)
        return specs

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        weight, start = torch.empty(shape, dtype=dtype, device=tensors["weight.0"].device), 0
        for i, block_type in enumerate(self.block_types):
            stored = tensors[f"weight.{i}"]
            rows = weight[start : start + len(stored)]
            if block_type is None:
                rows.copy_(stored)
            elif not rows.is_meta:  # of a meta model, only sizes are asked for
                expand_into(rows, stored, block_type)
            start += len(stored)
        return self.inner.matrix({"weight": weight}, shape, dtype)


_PIECE_ELEMENTS = 2**15
"""Weights that are expanded at once: few enough for the caches, and for torch not to wait for its threads."""


def in_blocks(part: Part, block_type: str) -> Part:
    """The part as rows of blocks. Raises CheckpointError if its columns are not whole blocks."""
    elements, block_bytes = kernels.block_size(block_type)

    def num_bytes(columns: int) -> int:
        if columns % elements:
            raise CheckpointError(
                f"{columns} columns are not whole {block_type} blocks of {elements}: the matrix has another shape "
                "than the config says, or cannot be split there"
            )
        return columns // elements * block_bytes

    columns = None if part.columns is None else (num_bytes(part.columns[0]), num_bytes(part.columns[1]))
    return Part((part.shape[0], num_bytes(part.shape[1])), part.rows, columns)


def expand_into(out: Tensor, blocks: Tensor, block_type: str) -> None:
    """Write the weights that `blocks` [n, row_bytes] uint8 stand for into `out` [n, k], some rows at a time."""
    num_rows = max(1, _PIECE_ELEMENTS // out.shape[1])
    for start in range(0, len(out), num_rows):
        rows = slice(start, start + num_rows)
        out[rows].copy_(reference_blocks.expand(blocks[rows], block_type))
