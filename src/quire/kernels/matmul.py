"""Matrix multiplication by weights that are packed once, at load, into the layout the kernel streams."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import native_errors, refusal
from quire.kernels.quantized import QuantizedWeight, quantized_matmul
from quire.kernels.workspace import empty


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [n, k] in the kernels' layout. Made by pack_weight; the same for every ISA variant of one build."""

    n: int
    k: int
    dtype: torch.dtype
    data: Tensor
    """the packed bytes; the weight itself [n, k] where the reference kernels serve"""
    address: int
    code: int

    @property
    def nbytes(self) -> int:
        """Bytes kept, padding included."""
        return self.data.nbytes


def pack_weight(weight: Tensor) -> PackedWeight:
    """Copy `weight` [n, k] float32 or bfloat16 into the kernels' layout.

    Rows must be contiguous in themselves; they may be strided and at any alignment (a memory-mapped file).
    """
    code = DTYPE_CODES.get(weight.dtype)
    if code is None or weight.dim() != 2 or not weight.is_cpu or (weight.stride(1) != 1 and weight.shape[1] > 1):
        raise refusal("pack_weight", "weight [n, k] float32 or bfloat16 with stride 1 in k, on the CPU", weight=weight)
    n, k = weight.shape
    if native is None:
        data = weight.detach().clone(memory_format=torch.contiguous_format)
    else:
        size = weight.element_size()
        data = torch.empty(native.packed_bytes(n, k, size), dtype=torch.uint8)
        native.pack(weight.data_ptr(), weight.stride(0) * size, n, k, size, data.data_ptr())
    return PackedWeight(n, k, weight.dtype, data, data.data_ptr(), code)


def unpack_weight(packed: PackedWeight) -> Tensor:
    """The weight [n, k] that was packed."""
    if native is None:
        return packed.data.clone()
    weight = torch.empty(packed.n, packed.k, dtype=packed.dtype)
    native.unpack(packed.address, packed.n, packed.k, weight.element_size(), weight.data_ptr())
    return weight


def matmul(
    x: Tensor,
    packed: PackedWeight | QuantizedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, accumulated in float32: x [num_tokens, k] -> [num_tokens, n] in out_dtype (default: x's).

    x has the weight's dtype and contiguous rows, which may be strided; bias [n] float32. By a quantized weight, x is
    multiplied quantized too, as `reference.quantized_matmul` says.
    """
    if out_dtype is None:
        out_dtype = packed.dtype
    out_code = DTYPE_CODES.get(out_dtype)
    n, k = packed.n, packed.k
    shape = x.shape
    if (
        len(shape) != 2
        or shape[1] != k
        or x.dtype is not packed.dtype
        or not x.is_cpu
        or out_code is None
        or (x.stride(1) != 1 and k > 1)
        or (bias is not None and not _is_bias(bias, n))
    ):
        raise _refusal(x, packed, bias, out_dtype)
    with native_errors():
        if isinstance(packed, QuantizedWeight):
            return quantized_matmul(x, packed, bias, out_dtype)
        if native is None:
            return reference.matmul(x, packed.data, bias, out_dtype)
        rows = shape[0]
        out = empty((rows, n), out_dtype)
        native.matmul(
            packed.code,
            x.data_ptr(),
            x.stride(0),
            rows,
            packed.address,
            n,
            k,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_code,
        )
    return out


def _is_bias(bias: Tensor, n: int) -> bool:
    return bias.dtype is torch.float32 and bias.shape == (n,) and bias.is_contiguous() and bias.is_cpu


def _refusal(
    x: Tensor, packed: PackedWeight | QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Exception:
    dtype = str(packed.dtype).removeprefix("torch.")
    takes = (
        f"x [num_tokens, {packed.k}] {dtype} with stride 1 in the last dimension for this weight "
        f"[{packed.n}, {packed.k}] {dtype}, a contiguous float32 bias [{packed.n}] or None, on the CPU, and out_dtype "
        "float32 or bfloat16"
    )
    return refusal("matmul", takes, x=x, bias=bias, out_dtype=out_dtype)
