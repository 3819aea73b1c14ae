"""The MLP of a layer, gated or plain, or its experts."""

import torch
from torch import Tensor, nn

from quire import kernels
from quire.models.decoder.shapes import MLPShape
from quire.models.layers.activation import LearnedXIELU
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.experts import Experts, ExpertsShape
from quire.models.layers.linear import Linear, scaled_by


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, shape: MLPShape, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        widths = 2 * shape.width if shape.is_stacked else (shape.width, shape.width)
        self.gate_up_proj = Linear(hidden_size, widths, bias=shape.up_bias, dtype=dtype)
        self.down_proj = Linear(shape.width, hidden_size, bias=shape.down_bias, dtype=dtype)
        self.down_proj.changes = scaled_by(shape.output_multiplier)
        self.act = kernels.Activated(shape.activation, is_gated=True)

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """x [num_tokens, hidden] -> as x."""
        return self.down_proj.activated(self.gate_up_proj(x, batch), self.act, batch)


class PlainMLP(nn.Module):
    """`down(act(up(x)))`."""

    def __init__(self, shape: MLPShape, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, is_transposed = shape.width, shape.is_transposed
        self.up_proj = Linear(hidden_size, width, bias=shape.up_bias, dtype=dtype, is_transposed=is_transposed)
        self.down_proj = Linear(width, hidden_size, bias=shape.down_bias, dtype=dtype, is_transposed=is_transposed)
        self.down_proj.changes = scaled_by(shape.output_multiplier)
        self.act_fn = LearnedXIELU() if shape.activation == "xielu" else None
        self.act = kernels.Activated(shape.activation, is_gated=False)

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """x [num_tokens, hidden] -> as x."""
        act = self.act if self.act_fn is None else kernels.Activated(self.act_fn.kind, is_gated=False)
        return self.down_proj.activated(self.up_proj(x, batch), act, batch)


def make_mlp(shape: MLPShape | ExpertsShape, hidden_size: int, dtype: torch.dtype) -> nn.Module:
    """The module that computes it: `forward(x, batch)`."""
    if isinstance(shape, ExpertsShape):
        if shape.shared_width is None:
            return Experts(shape, hidden_size, dtype)
        shared = MLPShape(shape.shared_width, shape.activation, output_multiplier=shape.shared_multiplier)
        return Experts(shape, hidden_size, dtype, GatedMLP(shared, hidden_size, dtype))
    return (GatedMLP if shape.is_gated else PlainMLP)(shape, hidden_size, dtype)
