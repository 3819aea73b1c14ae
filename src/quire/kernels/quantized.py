"""Weights of 8 and 4 bits, made from float32 or bfloat16 ones. `kernels.matmul` and `kernels.embedding` take them.

`reference.quantize_weight` and `reference.quantized_matmul` say which integers and what arithmetic; all variants of the
native kernels give exactly its bits.
"""

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels.backends import backend_for, backend_of
from quire.kernels.checks import DTYPES, describe, refusal
from quire.kernels.weights import QUANTIZED_FORMATS, QuantizedWeight

_MAX_K = 65536
"""A sum of at most this many products of bytes fits an int32."""


def quantized_bytes(n: int, k: int, format: str) -> int:
    """The size of a quantized weight [n, k] on the CPU."""
    return backend_for("cpu").quantized_bytes(n, k, format)


def mapped_weight(n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
    """A QuantizedWeight around the `data` of an earlier one, which is kept, not copied.

    Raises KernelError on the reference backend, which keeps weights in another layout.
    """
    backend = backend_of(data)
    num_bytes = backend.quantized_bytes(n, k, format)
    if data.dtype is not torch.uint8 or data.shape != (num_bytes,):
        raise refusal("mapped_weight", f"data uint8 [{num_bytes}] for [{n}, {k}]", data=data)
    return backend.mapped_weight(n, k, dtype, format, data)


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
