"""Integers as compressed-tensors stores them: packed into words, or each in a byte."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.common.errors import CheckpointError
from quire.config.quantization.compressed import CompressedScheme
from quire.kernels import PlacedIntegers
from quire.models.layers.stored.integers import Layout, Numbers, StoredIntegers, order_of, places
from quire.models.layers.weighted_layer import Part, WeightSpec


@dataclass(frozen=True, slots=True)
class CompressedIntegers(StoredIntegers):
    """The tensors `weight_packed` or `weight`, `weight_scale`, and `weight_zero_point` if there are zero points."""

    scheme: CompressedScheme
    scale_dtype: torch.dtype
    scale_shape: tuple[int, ...] | None
    """The shape of the only scale, () or (1,); None if there are more."""
    shape_dtype: torch.dtype | None
    """Of `weight_shape`, which states n and k; None if it is absent."""
    has_order: bool
    """Whether there is a `weight_g_idx`: the group of each input."""

    def specs(self, part: Part, dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        (n, k), bits = part.shape, self.scheme.bits
        scales = self.scale_shape if self.scale_shape is not None else (n, self._groups(k))
        if self._is_packed:
            specs = {"weight_packed": _spec((n, _words(k, bits)), torch.int32)}
        else:
            specs = {"weight": _spec((n, k), torch.int8)}
        specs["weight_scale"] = _spec(scales, self.scale_dtype)
        if not self.scheme.is_symmetric:
            is_packed = self._is_packed and self.scale_shape is None
            zeros = _spec((_words(n, bits), scales[-1]), torch.int32) if is_packed else _spec(scales, torch.int8)
            specs["weight_zero_point"] = zeros
        if self.shape_dtype is not None:
            specs["weight_shape"] = _spec((2,), self.shape_dtype)
        if self.has_order:
            specs["weight_g_idx"] = _spec((k,), torch.int32)
        return specs

    def layout(self, k: int) -> Layout:
        scheme = self.scheme
        scale_range = scheme.block[1] or -(-k // 32) * 32
        return Layout(scheme.bits, scale_range, self.scale_dtype, not scheme.is_symmetric, scheme.is_reordered)

    def numbers(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Numbers:
        bits = self.scheme.bits
        if self.shape_dtype is not None and tensors["weight_shape"].tolist() != [n, k]:
            raise CheckpointError(f"weight_shape is {tensors['weight_shape'].tolist()}, but the config says {[n, k]}")
        if self._is_packed:
            rows = torch.arange(n) * (32 * _words(k, bits))
            integers = PlacedIntegers(tensors["weight_packed"], bits, rows, places(k, bits))
        else:
            integers = PlacedIntegers.in_bytes(_from_middle(tensors["weight"], bits), bits)
        ranges = (n, self._groups(k))
        zeros = None
        if not self.scheme.is_symmetric:
            zeros = tensors["weight_zero_point"]
            if zeros.dtype is torch.int32:
                rows, columns = places(n, bits, words_apart=ranges[1]), torch.arange(ranges[1]) * 32
                zeros = PlacedIntegers(zeros, bits, rows, columns).values()
            else:
                zeros = _from_middle(zeros, bits).expand(ranges)
        order = None
        if self.has_order:
            order = order_of(tensors["weight_g_idx"], self.layout(k).scale_range, may_differ=self.scheme.is_reordered)
        scales = tensors["weight_scale"].expand(ranges)
        return Numbers(integers if order is None else integers.in_order(order), scales, zeros, order)

    @property
    def _is_packed(self) -> bool:
        return self.scheme.format == "pack-quantized"

    def _groups(self, k: int) -> int:
        size = self.scheme.block[1] or k
        if k % size:
            raise CheckpointError(f"group_size {size} does not divide the {k} inputs: the config has another shape")
        return k // size


def _spec(shape: tuple[int, ...], dtype: torch.dtype) -> WeightSpec:
    return WeightSpec((Part(shape),), dtype)


def _words(count: int, bits: int) -> int:
    """The int32 words that hold this many integers; the last may have room left."""
    return -(-count * bits // 32)


def _from_middle(values: Tensor, bits: int) -> Tensor:
    """Signed integers, int8, as uint8 with the zero at 2 ** (bits - 1). Raises CheckpointError for larger ones."""
    middle = 2 ** (bits - 1)
    if bits < 8 and not bool(((values >= -middle) & (values < middle)).all()):
        raise CheckpointError(f"weight_zero_point holds integers that do not fit {bits} bits")
    return (values.to(torch.int16) + middle).to(torch.uint8) if bits < 8 else values.view(torch.uint8) ^ 128
