"""What a layer of a mixture of experts gives its kernels: routing, the experts' matrices, and the grouping."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels.checks import describe, refusal
from quire.kernels.weights import FORMATS, Matrix, PackedWeight, QuantizedWeight, StackedWeight

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
"""What logits become. A scoring's index here is its number in csrc/base/kernel_table.h."""
MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token goes to, and what their results count.

    Scores are a `softmax` over all experts, or the `sigmoid` of each logit. The `top_k` experts with the largest scores
    are chosen, best first. A softmax over the chosen logits alone is `softmax` with `is_normalized`.

    `sparsemixer` (Liu et al. 2023): the largest logit counts its share in a softmax over those that are less than
    2 * `jitter` below it, relative to the larger magnitude; the next one likewise, without the logits chosen before.
    """

    top_k: int
    num_experts: int
    scoring: str = "softmax"
    is_normalized: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0
    """What all weights are multiplied with, at the end."""
    num_groups: int = 1
    """Groups of neighbouring experts, as many in each."""
    top_groups: int = 1
    """How many groups a token's experts are chosen from: those with the best experts."""
    has_pairs: bool = False
    """Whether a group is as good as its two best experts together, instead of its best one."""
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if wrong := self._wrong():
            raise KernelError(wrong)

    def _wrong(self) -> str:
        """Which numbers do not fit together; an empty string if all do."""
        if not 0 < self.num_experts <= MAX_EXPERTS:
            return f"{self.num_experts} experts: there must be 1 to {MAX_EXPERTS}"
        size, rest = divmod(self.num_experts, max(self.num_groups, 1))
        if rest or not 0 < self.top_groups <= self.num_groups:
            return (
                f"{self.top_groups} of {self.num_groups} groups of {self.num_experts} experts: groups must have the "
                "same size, and 1 to all of them must be chosen"
            )
        most = size * self.top_groups
        if not 0 < self.top_k <= most:
            return f"{self.top_k} experts for each token, which chooses from {most}: there must be 1 to {most}"
        if self.has_pairs and size == 1:
            return f"{self.num_groups} groups of one expert: groups judged by their two best experts must have two"
        return "" if self.scoring in SCORINGS else f"scoring {self.scoring!r}: it must be one of {', '.join(SCORINGS)}"


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The pairs of a token and one of its experts, grouped by expert. Pair t * top_k + rank is a token's at a rank."""

    top_k: int
    starts: Tensor
    """[num_experts + 1] int32: where the pairs of each expert begin"""
    pairs: Tensor
    """[num_tokens * top_k] int32: the pairs in the order of their experts, and within an expert in their own"""
    places: Tensor
    """[num_tokens * top_k] int32: the place of each pair in that order"""

    def of_experts(self, first: int, end: int) -> "ExpertRows":
        """The same rows for a product by the experts [first, end) alone, which writes theirs and no others."""
        return ExpertRows(self.top_k, self.starts[first : end + 1], self.pairs, self.places)


class ExpertFiles:
    """Where the matrices of experts lie that may have to be read from a file, several for each expert."""

    def __init__(self, experts: Sequence[Sequence[QuantizedWeight]]) -> None:
        """The matrices of each expert, as many for all."""
        places = [[(matrix.address, matrix.data.nbytes) for matrix in matrices] for matrices in experts]
        self.ranges = np.array(places, np.int64)
        """[num_experts, matrices, 2]: address and bytes. No tensor: it may be made while kernels are recorded."""


class ExpertWeights:
    """A matrix [n, k] for each expert of a layer, with biases [n] float32 or without. It keeps them alive.

    Matrices may be of any formats, and consist of several parts if all of them are cut alike.
    """

    def __init__(self, matrices: Sequence[Matrix], biases: Sequence[Tensor] | None = None) -> None:
        self.experts = [each.parts if isinstance(each, StackedWeight) else (each,) for each in matrices]
        """The parts of each."""
        self.num_experts, self.biases = len(self.experts), biases
        forms = [(tuple(part.n for part in parts), parts[0].k, parts[0].dtype) for parts in self.experts]
        devices = {part.data.device for parts in self.experts for part in parts}
        if len(set(forms)) != 1 or len(devices) != 1:
            takes = "matrices, at least one, in parts of equal rows, k and dtype, on one device"
            raise refusal("ExpertWeights", takes, matrices=forms, devices=devices)
        self.sizes, self.k, self.dtype = forms[0]
        """The rows of each part."""
        self.n = sum(self.sizes)
        if biases is not None and (
            len(biases) != len(matrices)
            or any(bias.dtype is not torch.float32 or bias.shape != (self.n,) for bias in biases)
            or not all(bias.is_contiguous() and bias.device in devices for bias in biases)
        ):
            takes = f"{len(matrices)} contiguous float32 biases [{self.n}] where the matrices are, or None"
            raise refusal("ExpertWeights", takes, biases=[describe(bias) for bias in biases])
        self.entries = np.array([self._entry(e, part) for part in range(len(self.sizes)) for e in range(len(matrices))])
        """[parts * num_experts, 5] int64: ExpertEntry of csrc/base/kernel_table.h. No tensor: it may be made while
        kernels are recorded."""
        self.formats = [
            {(part.format, part.scale_range) if isinstance(part, QuantizedWeight) else None for part in of_experts}
            for of_experts in zip(*self.experts, strict=True)
        ]
        """The formats and scale ranges in each part; None for packed matrices."""

    def bias(self, expert: int, part: int) -> Tensor | None:
        """The bias of a part of an expert's matrix, [rows of the part]."""
        start = sum(self.sizes[:part])
        return None if self.biases is None else self.biases[expert][start : start + self.sizes[part]]

    def _entry(self, expert: int, part: int) -> tuple[int, int, int, int, int]:
        weight, bias = self.experts[expert][part], self.bias(expert, part)
        bias_at = 0 if bias is None else bias.data_ptr()
        if isinstance(weight, PackedWeight):
            return weight.address, bias_at, 0, -1, 0
        order = 0 if weight.order is None else weight.order.data_ptr()
        return weight.address, bias_at, order, FORMATS.index(weight.format), weight.scale_range
