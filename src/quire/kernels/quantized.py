"""Weights of 8 and 4 bits, made from float32 or bfloat16 ones or by other tools. `kernels.matmul` and
`kernels.embedding` take them.

`reference.quantize_weight` and `reference.quantized_matmul` say which integers and what arithmetic; all variants of the
native kernels give exactly its bits. Weights of other tools keep their values, and nothing of them is rounded.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels.backends import backend_for, backend_of
from quire.kernels.backends.reference_blocks import BLOCKS
from quire.kernels.checks import DTYPES, describe, refusal
from quire.kernels.weights import BLOCK_FORMATS, INTEGER_FORMATS, QUANTIZED_FORMATS, PlacedIntegers, QuantizedWeight

_MAX_K = 65536
"""A sum of at most this many products of bytes fits an int32."""


_SCALES = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}


def block_size(format: str) -> tuple[int, int]:
    """The elements and the bytes of a block of one of BLOCK_FORMATS."""
    if format not in BLOCKS:
        raise refusal("block_size", f"one of {', '.join(BLOCK_FORMATS)}", format=format)
    return BLOCKS[format].elements, BLOCKS[format].num_bytes


def quantized_bytes(n: int, k: int, format: str, scale_range: int = 0) -> int:
    """The size of a quantized weight [n, k] on the CPU."""
    _check_size("quantized_bytes", n, k, format, scale_range)
    return backend_for("cpu").quantized_bytes(n, k, format, _within(scale_range, k))


def mapped_weight(n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
    """A QuantizedWeight around the `data` of an earlier one, which is kept, not copied. None of INTEGER_FORMATS.

    Raises KernelError on the reference backend, which keeps weights in another layout.
    """
    _check_size("mapped_weight", n, k, format, 0)
    backend = backend_of(data)
    num_bytes = backend.quantized_bytes(n, k, format, 0)
    is_data = data.dtype is torch.uint8 and data.shape == (num_bytes,) and data.is_contiguous()
    if not is_data or dtype not in DTYPES:
        takes = f"contiguous data uint8 [{num_bytes}] for [{n}, {k}] and dtype float32 or bfloat16"
        raise refusal("mapped_weight", takes, data=data, dtype=dtype)
    return backend.mapped_weight(n, k, dtype, format, data)


def weight_copy(data: Tensor) -> Tensor:
    """The bytes uint8 [n], in memory that the kernels read fastest."""
    return backend_of(data).weight_copy(data)


def quantize_weight(weight: Tensor, format: str) -> QuantizedWeight:
    """Quantize `weight` [n, k] float32 or bfloat16, k up to 65536, to `int8` or `int4`.

    Rows must be contiguous in themselves; they may be strided. Raises KernelError if an element is not finite.
    """
    if (
        weight.dtype not in DTYPES
        or format not in QUANTIZED_FORMATS
        or weight.dim() != 2
        or weight.shape[1] > _MAX_K
        or (weight.stride(1) != 1 and weight.shape[1] > 1)
    ):
        takes = (
            f"weight [n, k <= {_MAX_K}] float32 or bfloat16 with stride 1 in k, and format "
            f"{' or '.join(QUANTIZED_FORMATS)}"
        )
        raise refusal("quantize_weight", takes, weight=weight, format=format)
    quantized = backend_of(weight).quantize_weight(weight, format)
    if quantized is None:
        raise KernelError(
            f"quantize_weight takes finite weights; this one holds infinities or NaNs: {describe(weight)}"
        )
    return quantized


def pack_blocks(rows: Tensor, k: int, dtype: torch.dtype, format: str) -> QuantizedWeight:
    """A weight [n, k] from rows of ggml's blocks: uint8 [n, k / elements * bytes], contiguous in a row (`block_size`).

    `dtype` is that of the rows it will be multiplied with. Raises KernelError if a scale or minimum is not finite.
    """
    if format in BLOCK_FORMATS and rows.dim() == 2 and rows.dtype is torch.uint8 and dtype in DTYPES:
        elements, num_bytes = block_size(format)
        if k % elements == 0 and k <= _MAX_K and rows.shape[1] == k // elements * num_bytes and _has_whole_rows(rows):
            return _finite(backend_of(rows).pack_blocks(rows, k, dtype, format))
    takes = f"rows uint8 [n, bytes of {k} elements <= {_MAX_K} in whole blocks] and format {', '.join(BLOCK_FORMATS)}"
    raise refusal("pack_blocks", takes, rows=rows, k=k, format=format, dtype=dtype)


def pack_integers(
    parts: Sequence[PlacedIntegers],
    scales: Tensor,
    zeros: Tensor | None,
    dtype: torch.dtype,
    scale_range: int,
    order: Tensor | None = None,
) -> QuantizedWeight:
    """A weight [n, k] of (integer - zero) * scale, where `scale_range` neighbours along k share scale and zero.

    parts: integers of equal bits, those of each below those of the one before. scales [n, ranges] float16, bfloat16 or
    float32; zeros uint8 [n, ranges], or None where all are 2 ** (bits - 1). `scale_range` is a multiple of 32, or at
    least k. uint8 scales and 4 bits are MXFP4: bits of its numbers, and exponents for each 32. All contiguous. `dtype`
    is that of the rows that it will be multiplied with: these are rounded in groups of 32, or of 128 for integers of 4
    bits if k and `scale_range` are multiples of 128. Column j is multiplied with x's column `order[j]`, int32 [k], if
    that is given. Raises KernelError if a scale is not finite.
    """
    n = sum(part.rows.numel() for part in parts)
    k, bits = (parts[0].columns.numel(), parts[0].bits) if parts else (0, 0)
    is_float4 = scales.dtype is torch.uint8 and bits == 4 and scale_range == 32 and zeros is None
    ranges = (n, -(-k // max(scale_range, 1)))
    if not (
        bits in (4, 8)
        and all(_fits(part, bits, k, scales.device) for part in parts)
        and k <= _MAX_K
        and (is_float4 or scales.dtype in _SCALES)
        and scale_range > 0
        and (scale_range % 32 == 0 or scale_range >= k)
        and scales.shape == ranges
        and (zeros is None or (zeros.dtype is torch.uint8 and zeros.shape == ranges and zeros.is_contiguous()))
        and scales.is_contiguous()
        and dtype in DTYPES
        and (order is None or _is_order(order, k))
    ):
        takes = (
            f"contiguous integers [n, k <= {_MAX_K}] of 4 or 8 bits inside of their tensors, at contiguous int64 rows "
            "and columns, scales [n, ranges] float16, bfloat16 or float32, zeros uint8 [n, ranges] or None, "
            "scale_range a multiple of 32 or at least k, order int32 [k] with each column once, or None"
        )
        raise refusal("pack_integers", takes, parts=parts, scales=scales, zeros=zeros, scale_range=scale_range)
    format = integer_format(bits, scales.dtype, has_zeros=zeros is not None)
    scale_range = 0 if is_float4 else _within(scale_range, k)
    packed = _finite(backend_of(scales).pack_integers(parts, scales, zeros, dtype, format, scale_range))
    return packed if order is None else dataclasses.replace(packed, order=order)


def _within(scale_range: int, k: int) -> int:
    """The range as kernels take it: a multiple of 32, of which k columns need no more. 0 stays 0."""
    return -(-min(scale_range, max(k, 1)) // 32) * 32


def _check_size(kernel: str, n: int, k: int, format: str, scale_range: int) -> None:
    formats = (*QUANTIZED_FORMATS, *BLOCK_FORMATS, *(INTEGER_FORMATS if scale_range > 0 else ()))
    if not (0 <= n < 2**31 and 0 <= k <= _MAX_K and format in formats):
        takes = f"n < 2 ** 31, k <= {_MAX_K} and, with this scale_range, a format of {', '.join(formats)}"
        raise refusal(kernel, takes, n=n, k=k, format=format, scale_range=scale_range)


def _fits(part: PlacedIntegers, bits: int, k: int, device: torch.device) -> bool:
    are_places = part.data.is_meta or all(
        places.dtype is torch.int64 and places.dim() == 1 and places.is_contiguous() and places.is_cpu
        for places in (part.rows, part.columns)
    )
    is_whole = part.data.is_contiguous() and part.data.device == device
    return part.bits == bits and part.columns.numel() == k and is_whole and are_places and part.are_inside()


def _finite(weight: QuantizedWeight | None) -> QuantizedWeight:
    if weight is None:
        raise KernelError("scales are not finite")
    return weight


def _is_order(order: Tensor, k: int) -> bool:
    is_row = order.dtype is torch.int32 and order.shape == (k,) and order.is_contiguous()
    return is_row and torch.equal(order.sort().values, torch.arange(k, dtype=torch.int32))


def integer_format(bits: int, scales: torch.dtype, *, has_zeros: bool) -> str:
    """The format that `pack_integers` gives."""
    if scales is torch.uint8:
        return "mxfp4"
    return f"u{bits}_{_SCALES[scales]}{'_zeros' if has_zeros else ''}"


def _has_whole_rows(rows: Tensor) -> bool:
    return rows.stride(1) == 1 or rows.shape[1] <= 1
