"""Norms, alone and fused with the residual sum before them."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm over a width that the place where it stands gives."""

    eps: float
    is_rms: bool = True
    """RMSNorm, and not LayerNorm, which subtracts the mean."""
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0
    """Added to the weights of the checkpoint."""
    multiplier: float = 1.0
    """The weights are multiplied by it then."""


class Norm(WeightedLayer):
    """A norm over the last dimension. Without weights of its own it multiplies by 1."""

    weight: Tensor

    def __init__(self, width: int, shape: NormShape) -> None:
        super().__init__()
        self.width = width
        self.shape = shape
        self.eps = shape.eps
        if not shape.has_weight:
            self.weight = torch.ones(width)

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        spec = WeightSpec((Part((self.width,)),), torch.float32)
        wanted = {"weight": self.shape.has_weight, "bias": self.shape.has_bias}
        return {name: spec for name, is_wanted in wanted.items() if is_wanted}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        if "weight" in tensors:
            weight = self.weight = tensors["weight"].clone()  # [width]
            if not weight.is_meta:  # where memory is planned, torch's arithmetic loads its compiler
                weight.add_(self.shape.offset).mul_(self.shape.multiplier)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> its norm, in new memory."""

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place; the norm of that sum, in new memory."""


class RMSNorm(Norm):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(Norm):
    """Layer norm (Ba et al. 2016)."""

    def __init__(self, width: int, shape: NormShape) -> None:
        super().__init__(width, shape)
        self.bias: Tensor | None = None

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        super().set_weights(tensors)
        if "bias" in tensors:
            self.bias = tensors["bias"].clone()  # [width]

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


def make_norm(width: int, shape: NormShape) -> Norm:
    """A norm of this shape over `width` elements."""
    return (RMSNorm if shape.is_rms else LayerNorm)(width, shape)
