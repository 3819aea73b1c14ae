"""What the loader knows of a layer: which ranges of which tensors it wants, and how to hand them over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.config.parallel import Range


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a checkpoint, or a range of its rows and columns: a shard, or one of several fused projections."""

    shape: tuple[int, ...]
    """The shape of the whole tensor in the checkpoint."""
    rows: Range | None = None
    """A range of the first dimension. None: all of it."""
    columns: Range | None = None
    """A range of the second dimension. None: all of it."""
    is_transposed: bool = False
    """Whether the layer wants its transpose. All that follows, and rows and columns, are the transpose's."""
    blocks: tuple[int, ...] | None = None
    """The rows divide into this many blocks of equal length; the layer wants these of them in this order."""

    @property
    def is_arranged(self) -> bool:
        """Whether the layer wants rows in another order, or the transpose."""
        return self.is_transposed or self.blocks is not None

    @property
    def arranged_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor as the layer wants it."""
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the range."""
        shape = self.arranged_shape
        ranges = (self.rows, self.columns)[: len(shape)]
        sizes = (length if r is None else r[1] - r[0] for length, r in zip(shape, ranges, strict=False))
        return (*sizes, *shape[2:])

    def arranged(self, tensor: Tensor) -> Tensor:
        """The whole tensor as the layer wants it, from that of the checkpoint; in new memory if rows are reordered."""
        tensor = tensor.T if self.is_transposed else tensor
        return tensor if self.blocks is None else self.reordered(tensor)

    def reordered(self, rows: Tensor) -> Tensor:
        """Rows of the transposed or plain tensor, or of another with as many of them, in the order of the blocks."""
        if self.blocks is None:
            return rows
        blocks = rows.reshape(len(self.blocks), -1, *rows.shape[1:])
        return blocks[list(self.blocks)].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor that a layer wants: parts of a checkpoint's tensors, stacked along one dimension."""

    parts: tuple[Part, ...]
    dtype: torch.dtype
    """Floating point is converted to it. Integers, which may be a kernel's own layout, must be stored in it."""
    axis: int = 0
    """The dimension along which the parts are stacked."""
    kept: bool = False
    """Whether the layer keeps this very tensor. If not, it copies what it needs before `set_weights` returns."""
    kept_bytes: int | None = None
    """The size of what the layer makes of it. None: as large as the stack."""
    module: int | None = None
    """Of a layer that fuses modules: the index of the one whose tensor this is, under this spec's name without its last
    part (`weight.1` is the `weight` of module 1). None: the parts are those of all modules."""

    modules: tuple[int, ...] | None = None
    """For each part, the index of the module that it is of, where a layer wants ranges of them. None: one of each."""
    source: str | None = None
    """The model's name of the tensor that all parts are of, where another layer has it too. None: the layer's own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack. A single number cannot be stacked."""
        first = self.parts[0].size
        if not first:
            return first
        length = sum(part.size[self.axis] for part in self.parts)
        return (*first[: self.axis], length, *first[self.axis + 1 :])

    @property
    def stack_bytes(self) -> int:
        """The size of the stack."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """What the layer keeps of it."""
        return self.stack_bytes if self.kept_bytes is None else self.kept_bytes


class WeightedLayer(nn.Module, ABC):
    """A layer with weights of its own. It owns them from `set_weights` on; `forward` before that is an error."""

    @abstractmethod
    def weight_specs(self) -> Mapping[str, WeightSpec]:
        """Every tensor the layer wants, by its name in the layer and, below the layer's name, in the checkpoint."""

    @abstractmethod
    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take all tensors, of the specs' dtypes and shapes. Their memory is a file's, or reused unless `kept`."""
