"""The layers behind a model that pools: small matrices, kept and multiplied in float32 whatever the model's dtype."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quire import kernels
from quire.models.layers.norm import LayerNorm, NormShape
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec

ACTIVATIONS: Mapping[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "tanh": lambda x: _tanh(x),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    **{kind: partial(kernels.activation, kind=kind) for kind in kernels.checks.ACTIVATIONS},
}
"""Of values [num_rows, width] float32, which it may write to."""


def _tanh(x: Tensor) -> Tensor:
    kernels.softcap(x, 1.0)
    return x


class Dense(WeightedLayer):
    """`x @ weight.T + bias` in float32."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.size = (out_features, in_features)
        self.has_bias = bias
        self.bias: Tensor | None = None

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        specs = {"weight": WeightSpec((Part(self.size),), torch.float32)}
        return specs | ({"bias": WeightSpec((Part(self.size[:1]),), torch.float32)} if self.has_bias else {})

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = kernels.pack_weight(tensors["weight"])
        if self.has_bias:
            self.bias = tensors["bias"].clone()

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, in_features] float32 -> [num_rows, out_features]."""
        return kernels.matmul(x, self.weight, self.bias)


class ActivatedDense(nn.Module):
    """A Dense and an activation."""

    def __init__(self, in_features: int, out_features: int, activation: str | None, *, bias: bool) -> None:
        super().__init__()
        self.dense = Dense(in_features, out_features, bias=bias)
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, in_features] float32 -> [num_rows, out_features]."""
        return self._activation(self.dense(x))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What makes logits of a row: `out(norm(activation(dense(row))))`."""

    has_dense: bool = False
    activation: str | None = "tanh"
    dense_bias: bool = True
    norm: NormShape | None = None
    """Only behind a dense layer."""
    out_bias: bool = True
    mode: str = "first"
    """The row that a text is classified by: `first`, `last`, or a way of kernels.pool_rows."""


REWARD_HEAD = HeadShape(has_dense=True, activation="relu")
"""Of the reward models of Qwen2.5-Math (Yang et al. 2024)."""
HEAD_NAMES = (
    (r"^(?:\w+\.)?pooler\.dense\.(weight|bias)$", r"head.dense.\1"),
    (r"^(?:\w+\.)?pooler\.(weight|bias)$", r"head.dense.\1"),
    (r"^(?:classifier\.dense|pre_classifier|head\.dense|score\.0)\.(weight|bias)$", r"head.dense.\1"),
    (r"^head\.norm\.(weight|bias)$", r"head.norm.\1"),
    (r"^(?:classifier|classifier\.out_proj|score|score\.2)\.(weight|bias)$", r"head.out.\1"),
)
"""(regular expression, replacement): the names that checkpoints have for a head's tensors."""


class Head(nn.Module):
    """The logits of rows."""

    def __init__(self, shape: HeadShape, hidden_size: int, num_labels: int, out: Dense | None = None) -> None:
        """`out`: the layer behind all others, if it is not an ordinary one."""
        super().__init__()
        self.dense = Dense(hidden_size, hidden_size, bias=shape.dense_bias) if shape.has_dense else None
        self.norm = None if shape.norm is None else LayerNorm(hidden_size, shape.norm)
        self.out = out or Dense(hidden_size, num_labels, bias=shape.out_bias)
        self._activation = ACTIVATIONS[shape.activation]

    def forward(self, rows: Tensor) -> Tensor:
        """rows [num_rows, hidden] float32 -> logits [num_rows, num_labels]."""
        if self.dense is not None:
            rows = self._activation(self.dense(rows))
        if self.norm is not None:
            rows = self.norm(rows)
        logits: Tensor = self.out(rows)
        return logits
