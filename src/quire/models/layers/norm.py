"""Norms, alone and fused with the residual sum before them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec


class RMSNorm(WeightedLayer):
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension."""

    weight: Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width = width
        self.eps = eps

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return {"weight": WeightSpec((Part((self.width,)),), torch.float32)}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"].clone()  # [width]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> its norm, in new memory."""
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place; the norm of that sum, in new memory."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(WeightedLayer):
    """Layer norm (Ba et al. 2016) over the last dimension; without `affine` it has no weights."""

    def __init__(self, width: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        super().__init__()
        self.affine = affine
        self.eps = eps
        self.weight = torch.ones(width)
        self.bias = torch.zeros(width)

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        spec = WeightSpec((Part(tuple(self.weight.shape)),), torch.float32)
        return {"weight": spec, "bias": spec} if self.affine else {}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        if self.affine:
            self.weight, self.bias = tensors["weight"].clone(), tensors["bias"].clone()  # [width] each

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> its norm, in new memory."""
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place; the norm of that sum, in new memory."""
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
