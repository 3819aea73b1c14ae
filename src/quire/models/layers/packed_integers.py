"""Integers that GPTQ or AWQ packed: from a checkpoint's int32 words to the kernels' matrix, without rounding."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import CheckpointError
from quire.config.quantization.integers import IntegerScheme
from quire.models.layers.weighted_layer import Part, WeightSpec

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the 4 bits of each of eight neighbouring outputs lie in AWQ's word, counted from the lowest."""


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """The tensors `qweight`, `qzeros` and `scales`, and GPTQ's `g_idx`."""

    scheme: IntegerScheme
    scale_dtype: torch.dtype
    has_order: bool
    """Whether there is a `g_idx`: the group of each input, which need not be those of its neighbours."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        n, k = WeightSpec(parts, dtype).shape
        in_word, scheme = 32 // self.scheme.bits, self.scheme
        groups = self._groups(k)
        words = [self._words(part.shape[0], in_word) for part in parts]
        if scheme.is_awq:
            weight = tuple(Part((k, count)) for count in words)
        else:
            weight = tuple(Part((self._words(k, in_word), part.shape[0])) for part in parts)
        format = kernels.integer_format(scheme.bits, self.scale_dtype, has_zeros=not scheme.is_symmetric)
        kept_bytes = kernels.quantized_bytes(n, k, format, self._scale_range(k))
        specs = {
            "qweight": WeightSpec(weight, torch.int32, axis=1, kept_bytes=kept_bytes),
            "qzeros": WeightSpec(tuple(Part((groups, count)) for count in words), torch.int32, axis=1, kept_bytes=0),
            "scales": WeightSpec(
                tuple(Part((groups, part.shape[0])) for part in parts), self.scale_dtype, axis=1, kept_bytes=0
            ),
        }
        if self.has_order:
            kept_bytes = 4 * k if scheme.is_reordered else 0
            specs["g_idx"] = WeightSpec(tuple(Part((k,)) for _ in parts), torch.int32, kept_bytes=kept_bytes)
        return specs

    def matrix(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> kernels.QuantizedWeight:
        n, k = shape
        bits, scheme = self.scheme.bits, self.scheme
        if scheme.is_awq:
            integers = _along_outputs(tensors["qweight"], bits, is_awq=True).T
        else:
            integers = _bytes(tensors["qweight"], bits).transpose(1, 2).reshape(k, n).T
        zeros: Tensor | None = _along_outputs(tensors["qzeros"], bits, is_awq=scheme.is_awq).T + scheme.zero_offset
        assert zeros is not None
        if scheme.is_symmetric:
            if not zeros.is_meta and not bool((zeros == 2 ** (bits - 1)).all()):
                raise CheckpointError("the config says `sym`, but zero points in qzeros are not in the middle")
            zeros = None
        order = self._order(tensors["g_idx"].view(-1, k)) if self.has_order else None
        return kernels.pack_integers(
            (integers if order is None else integers[:, order]).contiguous(),
            tensors["scales"].T.contiguous(),
            None if zeros is None else zeros.contiguous(),
            dtype,
            bits,
            self._scale_range(k),
            None if order is None else order.int(),
        )

    def _scale_range(self, k: int) -> int:
        return self.scheme.group_size or -(-k // 32) * 32

    def _groups(self, k: int) -> int:
        return -(-k // self._scale_range(k))

    @staticmethod
    def _words(count: int, in_word: int) -> int:
        if count % in_word:
            raise CheckpointError(f"{count} integers do not fill words of {in_word}: the config has another shape")
        return count // in_word

    def _order(self, groups: Tensor) -> Tensor | None:
        """From the group of each input, [modules, k], the inputs in the order of their groups; None if they are in
        it. Raises CheckpointError if groups are of a wrong size, or differ between fused modules."""
        if groups.is_meta:
            return None
        k = groups.shape[1]
        in_order = (torch.arange(k) // self._scale_range(k)).int()
        if not self.scheme.is_reordered and torch.equal(groups, in_order.expand_as(groups)):
            return None
        if not torch.equal(groups, groups[:1].expand_as(groups)):
            raise CheckpointError("g_idx differs between projections that share their inputs")
        if not torch.equal(groups[0].sort().values, in_order):
            raise CheckpointError(f"g_idx must name each group, of {self._scale_range(k)} inputs, that many times")
        return groups[0].argsort(stable=True)


def _bytes(words: Tensor, bits: int) -> Tensor:
    """Words [rows, columns] int32 -> their integers, the lowest first, [rows, columns, 32 / bits] uint8."""
    parts = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return parts if bits == 8 else torch.stack([parts & 15, parts >> 4], -1).flatten(2)


def _along_outputs(words: Tensor, bits: int, *, is_awq: bool) -> Tensor:
    """Words [rows, n * bits / 32] int32 -> integers [rows, n] uint8."""
    integers = _bytes(words, bits)
    return (integers[:, :, _AWQ_ORDER] if is_awq else integers).flatten(1)
