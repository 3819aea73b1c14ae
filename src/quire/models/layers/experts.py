"""Mixtures of experts (Shazeer et al. 2017): each token goes through the MLPs that a router chooses for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from quire import kernels
from quire.config.parallel import Range
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.linear import Projection
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A layer's experts `down(act(gate(x)) * up(x))`, its router, and the expert that all tokens share."""

    routing: kernels.Routing
    width: int
    """Of an expert."""
    activation: kernels.ActivationKind
    bias: bool = False
    """Whether experts have biases."""
    router_bias: bool = False
    correction_shape: tuple[int, ...] | None = None
    """The checkpoint's shape of what is added to the scores when experts are chosen. None: nothing is."""
    shared_width: int | None = None
    """Of the expert that all tokens share. None: there is none."""
    shared_multiplier: float = 1.0
    """Of what the shared expert gives."""
    shared_gate: bool = False
    """Whether the shared expert counts the sigmoid of a product of its own."""


class Router(WeightedLayer):
    """A small matrix that is never quantized, whose products are float32."""

    weight: kernels.PackedWeight

    def __init__(
        self,
        hidden_size: int,
        num_outputs: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        correction_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self._specs = {"weight": WeightSpec((Part((num_outputs, hidden_size)),), dtype)}
        if bias:
            self._specs["bias"] = WeightSpec((Part((num_outputs,)),), torch.float32)
        if correction_shape is not None:
            self._specs["e_score_correction_bias"] = WeightSpec((Part(correction_shape),), torch.float32)
        self.bias: Tensor | None = None
        self.correction: Tensor | None = None

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return self._specs

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = kernels.pack_weight(tensors["weight"])
        if "bias" in tensors:
            self.bias = tensors["bias"].clone()  # [num_outputs]
        if "e_score_correction_bias" in tensors:
            self.correction = tensors["e_score_correction_bias"].flatten().clone()  # [num_outputs]

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, num_outputs] float32."""
        return kernels.matmul(x, self.weight, self.bias, torch.float32)


class Expert(nn.Module):
    """The matrices of one expert, which `ExpertProducts` multiplies with those of all others."""

    def __init__(self, width: int, hidden_size: int, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Projection(hidden_size, (width, width), bias=bias, dtype=dtype)
        self.down_proj = Projection(width, hidden_size, bias=bias, dtype=dtype)


class ExpertProducts(nn.Module):
    """A layer's experts, without what chooses them."""

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden_size: int,
        dtype: torch.dtype,
        activation: kernels.ActivationKind,
        *,
        top_k: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.top_k = activation, top_k
        self.gather_width: kernels.Gather | None = None
        self.gather_out: kernels.Gather | None = None
        """Where each rank has columns of every expert: what put the width together, and the sums over experts."""
        self.own: Range = (0, num_experts)
        self.gather_rows: kernels.GatherRows | None = None
        """Where each rank has some of the experts: which, and what puts the rows of all of them together."""
        self.experts = nn.ModuleList(Expert(width, hidden_size, dtype, bias=bias) for _ in range(num_experts))

    def products(self, x: Tensor, ids: Tensor) -> tuple[Tensor, kernels.ExpertRows]:
        """x [num_tokens, hidden] through the experts ids [num_tokens, top_k] int32 -> [num_tokens * top_k, hidden], in
        the order of the rows."""
        rows = kernels.group_by_expert(ids, len(self.experts))
        if self._files is not None:
            kernels.read_ahead(self._files, rows)
        own = rows.of_experts(*self.own)
        wide = kernels.expert_matmul(x, self._gate_up, own, of_tokens=True)  # [num_tokens * top_k, 2 * width]
        if self.gather_rows is None:
            narrow = kernels.gated_activation(wide, self.activation)
        else:
            narrow = self.gather_rows.gated_activation(wide, own, self.activation)
        del wide  # its memory is free for what follows
        narrow = narrow if self.gather_width is None else self.gather_width(narrow)
        y = kernels.expert_matmul(narrow, self._down, own, of_tokens=False)
        return (y if self.gather_rows is None else self.gather_rows(y, rows)), rows

    @cached_property
    def _gate_up(self) -> kernels.ExpertWeights:
        return _weights(self.experts, "gate_up_proj")

    @cached_property
    def _down(self) -> kernels.ExpertWeights:
        return _weights(self.experts, "down_proj")

    @cached_property
    def _files(self) -> kernels.ExpertFiles | None:
        """Where the experts' matrices are, if they are in a file."""
        in_file = [_in_file(expert) for expert in self.experts if isinstance(expert, Expert)]
        return kernels.ExpertFiles(in_file) if in_file[0] else None


class Experts(ExpertProducts):
    """The place of an MLP: the weighted sum of each token's experts, and of the shared one."""

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, dtype: torch.dtype, shared_experts: nn.Module | None = None
    ) -> None:
        """`shared_experts`: an MLP, `forward(x, batch)`."""
        routing = shape.routing
        num_experts, top_k = routing.num_experts, routing.top_k
        super().__init__(num_experts, shape.width, hidden_size, dtype, shape.activation, top_k=top_k, bias=shape.bias)
        self.routing = routing
        self.gate = Router(
            hidden_size, num_experts, dtype, bias=shape.router_bias, correction_shape=shape.correction_shape
        )
        self.shared_experts = shared_experts
        self.shared_expert_gate = Router(hidden_size, 1, dtype) if shape.shared_gate else None

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        """x [num_tokens, hidden] -> as x."""
        ids, weights = kernels.route(self.gate(x), self.routing, self.gate.correction)
        y, rows = self.products(x, ids)  # [num_tokens * top_k, hidden]
        shared = None if self.shared_experts is None else self.shared_experts(x, batch)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        out = kernels.combine_experts(y, weights, rows, shared, gate)
        return out if self.gather_out is None else self.gather_out(out)


def _in_file(expert: Expert) -> list[kernels.QuantizedWeight]:
    matrices = (expert.gate_up_proj.weight, expert.down_proj.weight)
    return [each for each in matrices if isinstance(each, kernels.QuantizedWeight) and each.in_file]


def _weights(experts: nn.ModuleList, name: str) -> kernels.ExpertWeights:
    projections: list[Projection] = [getattr(expert, name) for expert in experts if isinstance(expert, Expert)]
    biases = [each.bias for each in projections if each.bias is not None]
    return kernels.ExpertWeights([each.weight for each in projections], biases or None)
