"""Matrices in the blocks of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import CheckpointError
from quire.kernels import Matrix
from quire.kernels.backends import reference_blocks
from quire.models.layers.stored import pieces
from quire.models.layers.weight_format import WeightFormat
from quire.models.layers.weighted_layer import Part, WeightSpec


@dataclass(frozen=True, slots=True)
class InBlocks:
    """Rows of blocks, as bytes."""

    block_type: str

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        return {"weight": WeightSpec((in_blocks(part, self.block_type),), torch.uint8)}

    def expand(self, out: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for rows in pieces(out.shape):
            out[rows].copy_(reference_blocks.expand(tensors["weight"][rows], self.block_type))

    def format(self, sizes: tuple[int, ...]) -> WeightFormat:
        return Blocks(self.block_type)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks with the values that they have in the file. The kernels multiply by them as they are."""

    reads_ranges: ClassVar[bool] = True
    block_type: str

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        stored = tuple(in_blocks(part, self.block_type) for part in parts)
        return {"weight": WeightSpec(stored, torch.uint8, kept_bytes=kernels.quantized_bytes(n, k, self.block_type))}

    def matrix(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        return kernels.pack_blocks(tensors["weight"], shape[1], dtype, self.block_type)


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
    return Part((part.shape[0], num_bytes(part.shape[1])), part.rows, columns, blocks=part.blocks)
