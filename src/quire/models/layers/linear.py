"""Matrix multiplications, by weights in the format that a pass over modules chose (as they are, unless one did)."""

import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.weight_format import Matrix, Packed, WeightFormat
from quire.models.layers.weighted_layer import WeightedLayer, WeightSpec


class Linear(WeightedLayer):
    """`x @ weight.T + bias`. Several `out_features` make one matrix of projections that a checkpoint keeps apart."""

    weight: Matrix

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = (out_features,) if isinstance(out_features, int) else out_features
        self.dtype = dtype
        self.format: WeightFormat = Packed()
        self.has_bias = bias
        self.bias: Tensor | None = None

    def weight_specs(self) -> dict[str, WeightSpec]:
        specs = {"weight": self.format.spec(tuple((n, self.in_features) for n in self.out_features), self.dtype)}
        if self.has_bias:
            specs["bias"] = WeightSpec(tuple((n,) for n in self.out_features), torch.float32)
        return specs

    def set_weight(self, name: str, weight: Tensor) -> None:
        if name == "weight":
            self.weight = self.format.matrix(weight, (sum(self.out_features), self.in_features), self.dtype)
        else:
            self.bias = weight.clone()  # [sum(out_features)]

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, sum(out_features)]."""
        return kernels.matmul(x, self.weight, self.bias)


class LmHead(Linear):
    """The projection to the vocabulary; its result is float32 whatever the model computes in."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, hidden] -> logits [num_rows, vocab] float32."""
        return kernels.matmul(x, self.weight, None, torch.float32)
