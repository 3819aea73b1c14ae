"""What the loader knows of a layer: which weights it has, of which shapes, and how to hand them over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of a layer: tensors of these shapes in a checkpoint, stacked along the first dimension."""

    parts: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    kept: bool = False
    """the layer keeps the very tensor it is given; else it takes what it needs from it before `set_weight` returns"""
    kept_bytes: int | None = None
    """what the layer makes of it takes; none: as much as the stack in `dtype`"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stack."""
        return (sum(part[0] for part in self.parts), *self.parts[0][1:])

    @property
    def is_packed(self) -> bool:
        """The checkpoint holds what a kernel laid out, not numbers."""
        return self.dtype == torch.uint8

    @property
    def stack_bytes(self) -> int:
        """Of the stack, in `dtype`."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """That the layer keeps."""
        return self.stack_bytes if self.kept_bytes is None else self.kept_bytes


class WeightedLayer(nn.Module, ABC):
    """A layer with weights of its own. It owns them from `set_weight` on; `forward` before that is an error."""

    @abstractmethod
    def weight_specs(self) -> Mapping[str, WeightSpec]:
        """Every weight the layer needs, by its name in the layer."""

    @abstractmethod
    def set_weight(self, name: str, weight: Tensor) -> None:
        """Take a weight of the spec's dtype and shape; its memory is a file's, or reused unless `kept`."""
