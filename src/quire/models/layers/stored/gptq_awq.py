"""Integers as GPTQ or AWQ packs them into words."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.common.errors import CheckpointError
from quire.config.quantization.integers import IntegerScheme
from quire.kernels import PlacedIntegers
from quire.models.layers.stored.integers import Layout, Numbers, StoredIntegers, order_of, places
from quire.models.layers.weighted_layer import Part, WeightSpec

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the 4 bits of each of eight neighbouring outputs lie in AWQ's word, counted from the lowest."""


@dataclass(frozen=True, slots=True)
class PackedIntegers(StoredIntegers):
    """The tensors `qweight`, `qzeros` and `scales`, and GPTQ's `g_idx`."""

    scheme: IntegerScheme
    scale_dtype: torch.dtype
    has_order: bool
    """Whether there is a `g_idx`: the group of each input, which need not be those of its neighbours."""

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = part.shape
        if self.scheme.is_awq and k % (self.scheme.group_size or k):  # of GPTQ, the last group is shorter
            raise CheckpointError(f"AWQ's group_size {self.scheme.group_size} does not divide the {k} inputs")
        groups = -(-k // self.layout(k).scale_range)
        weight = Part((k, self._words(n)) if self.scheme.is_awq else (self._words(k), n))
        specs = {
            "qweight": WeightSpec((weight,), torch.int32),
            "qzeros": WeightSpec((Part((groups, self._words(n))),), torch.int32),
            "scales": WeightSpec((Part((groups, n)),), self.scale_dtype),
        }
        return {**specs, "g_idx": WeightSpec((Part((k,)),), torch.int32)} if self.has_order else specs

    def layout(self, k: int) -> Layout:
        scheme = self.scheme
        scale_range = scheme.group_size or -(-k // 32) * 32
        return Layout(scheme.bits, scale_range, self.scale_dtype, not scheme.is_symmetric, scheme.is_reordered)

    def numbers(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Numbers:
        scheme = self.scheme
        zeros = self._along_outputs(tensors["qzeros"], n).values().add_(scheme.zero_offset)
        if scheme.is_symmetric and bool((zeros.numpy() != 2 ** (scheme.bits - 1)).any()):
            raise CheckpointError("the config says `sym`, but zero points in qzeros are not in the middle")
        order = None
        if self.has_order:
            order = order_of(tensors["g_idx"], self.layout(k).scale_range, may_differ=scheme.is_reordered)
        integers = self._along_outputs(tensors["qweight"], n)
        if not scheme.is_awq:
            columns = places(k, scheme.bits, words_apart=n)
            integers = PlacedIntegers(tensors["qweight"], scheme.bits, torch.arange(n) * 32, columns)
        integers = integers if order is None else integers.in_order(order)
        return Numbers(integers, tensors["scales"].T, None if scheme.is_symmetric else zeros, order)

    def _words(self, count: int) -> int:
        in_word = 32 // self.scheme.bits
        if count % in_word:
            raise CheckpointError(f"{count} integers do not fill words of {in_word}: the config has another shape")
        return count // in_word

    def _along_outputs(self, words: Tensor, n: int) -> PlacedIntegers:
        """The integers [n, rows] of words [rows, n * bits / 32] int32."""
        bits, order = self.scheme.bits, _AWQ_ORDER if self.scheme.is_awq else range(8)
        return PlacedIntegers(words, bits, places(n, bits, order=order), torch.arange(len(words)) * (n * bits))
