"""Weights of 8 and 4 bits, made from float32 or bfloat16 ones. `kernels.matmul` and `kernels.embedding` take them.

`reference.quantize_weight` and `reference.quantized_matmul` say which integers and what arithmetic; all variants of the
native kernels give exactly its bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import refusal
from quire.kernels.workspace import empty

QUANTIZED_FORMATS = ("int8", "int4")
"""by their number in csrc/quantized/layout.h"""

_MAX_K = 65536
"""a sum of this many products of bytes always fits an int32"""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [n, k] as integers and scales, in the kernels' layout: the same for every ISA variant and machine."""

    n: int
    k: int
    dtype: torch.dtype
    """of the weight it was made from, and of the x it is multiplied with"""
    format: str
    """one of QUANTIZED_FORMATS"""
    codes: tuple[int, int]
    """the format's and the dtype's number"""
    data: Tensor
    """uint8; where the reference kernels serve, the integers [n, num_groups, group] int8"""
    address: int
    scales: Tensor | None = None
    """where the reference kernels serve: [n, num_groups] float32"""

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dequantized(self) -> Tensor:
        """What the integers and scales stand for: [n, k] float32. Only where the reference kernels serve."""
        assert self.scales is not None
        return (self.data * self.scales[..., None]).flatten(1)[:, : self.k]


def _weight(
    n: int, k: int, dtype: torch.dtype, format: str, data: Tensor, scales: Tensor | None = None
) -> QuantizedWeight:
    codes = QUANTIZED_FORMATS.index(format), DTYPE_CODES[dtype]
    return QuantizedWeight(n, k, dtype, format, codes, data, data.data_ptr(), scales)


def quantized_bytes(n: int, k: int, format: str) -> int:
    """What a quantized weight [n, k] takes."""
    if native is None:
        group = reference.group_size(k, format)
        return n * -(-k // group) * (group + 4)
    return int(native.quantized_bytes(QUANTIZED_FORMATS.index(format), n, k))


def mapped_weight(n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
    """A QuantizedWeight around the `data` of an earlier one, which is kept, not copied."""
    if native is None:
        raise KernelError("quantized weights that were saved need the native kernels, which are not in use")
    if data.dtype is not torch.uint8 or data.shape != (quantized_bytes(n, k, format),):
        raise refusal("mapped_weight", f"data uint8 [{quantized_bytes(n, k, format)}] for [{n}, {k}]", data=data)
    return _weight(n, k, dtype, format, data)


def quantize_weight(weight: Tensor, format: str) -> QuantizedWeight:
    """Quantize `weight` [n, k] float32 or bfloat16, k up to 65536, to `int8` or `int4`.

    Rows must be contiguous in themselves; they may be strided. Raises KernelError if an element is not finite.
    """
    code = DTYPE_CODES.get(weight.dtype)
    if (
        code is None
        or format not in QUANTIZED_FORMATS
        or weight.dim() != 2
        or not weight.is_cpu
        or weight.shape[1] > _MAX_K
        or (weight.stride(1) != 1 and weight.shape[1] > 1)
    ):
        takes = (
            f"weight [n, k <= {_MAX_K}] float32 or bfloat16 with stride 1 in k, on the CPU, and format "
            f"{' or '.join(QUANTIZED_FORMATS)}"
        )
        raise refusal("quantize_weight", takes, weight=weight, format=format)
    n, k = weight.shape
    if native is None:
        is_finite = bool(weight.isfinite().all())
        quantized = _weight(n, k, weight.dtype, format, *reference.quantize_weight(weight, format))
    else:
        data = torch.empty(quantized_bytes(n, k, format), dtype=torch.uint8)
        quantized = _weight(n, k, weight.dtype, format, data)
        is_finite = native.quantize(*quantized.codes, weight.data_ptr(), weight.stride(0), n, k, data.data_ptr())
    if not is_finite:
        raise KernelError(f"quantize_weight takes finite weights; this one [{n}, {k}] holds infinities or NaNs")
    return quantized


def quantized_matmul(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`matmul`, which has checked the arguments, on a quantized weight."""
    if weight.scales is not None:
        return reference.quantized_matmul(x, weight.data, weight.scales, bias, out_dtype)
    assert native is not None
    n, k, rows = weight.n, weight.k, x.shape[0]
    out = empty((rows, n), out_dtype)
    format_code, dtype_code = weight.codes
    quantized_rows = empty((native.quantized_rows_bytes(format_code, rows, k),), torch.uint8)
    native.quantized_matmul(
        format_code,
        dtype_code,
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.address,
        n,
        k,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        DTYPE_CODES[out_dtype],
        quantized_rows.data_ptr(),
    )
    return out


def gather_quantized(ids: Tensor, weight: QuantizedWeight) -> Tensor:
    """Rows of the weight [num_ids, k], rounded to its dtype."""
    out = empty((ids.numel(), weight.k), weight.dtype)
    native.gather_quantized(
        *weight.codes, ids.data_ptr(), ids.numel(), weight.address, weight.n, weight.k, out.data_ptr()
    )
    return out
