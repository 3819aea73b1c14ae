"""The residual sum, RMSNorm and LayerNorm, apart and in one."""

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import refusal
from quire.kernels.workspace import empty

_FLOAT32 = torch.float32


def add(x: Tensor, residual: Tensor) -> None:
    """`residual += x` in place; x, residual [..., hidden] contiguous, of one dtype."""
    code = DTYPE_CODES.get(x.dtype)
    if code is None or not x.shape or not _are_rows(x, residual):
        raise refusal("add", _ADD_TAKES, x=x, residual=residual)
    if native is None:
        return reference.add(x, residual)
    width = x.shape[-1]
    native.add(code, x.data_ptr(), residual.data_ptr(), x.numel() // (width or 1), width)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, as reference.rms_norm, into a new contiguous tensor.

    x [..., hidden] float32 or bfloat16, contiguous, or a view [num_tokens, num_heads, head_dim] of which only the last
    dimension is; weight [hidden] float32.
    """
    shape = x.shape
    width = shape[-1] if shape else 0
    code = DTYPE_CODES.get(x.dtype)
    if x.is_contiguous():
        rows, inner, outer_stride, inner_stride = x.numel() // (width or 1), 1, width, width
    elif len(shape) == 3 and x.stride(2) == 1:
        rows, inner, _ = shape
        outer_stride, inner_stride, _ = x.stride()
    else:
        code = None
    if code is None or not shape or not (x.is_cpu and _is_vector(weight, width)):
        raise refusal("rms_norm", _RMS_NORM_TAKES, x=x, weight=weight)
    if native is None:
        return reference.rms_norm(x, weight, eps)
    out = empty(shape, x.dtype)
    native.rms_norm(
        code, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), rows, inner, outer_stride, inner_stride, width
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then RMSNorm of it into a new tensor; as reference.add_rms_norm.

    x, residual [..., hidden] contiguous, of one dtype; weight [hidden] float32.
    """
    shape = x.shape
    width = shape[-1] if shape else 0
    code = DTYPE_CODES.get(x.dtype)
    if code is None or not shape or not (_are_rows(x, residual) and _is_vector(weight, width)):
        raise refusal("add_rms_norm", _ADD_TAKES, x=x, residual=residual, weight=weight)
    if native is None:
        return reference.add_rms_norm(x, residual, weight, eps)
    out = empty(shape, x.dtype)
    rows = x.numel() // (width or 1)
    native.add_rms_norm(code, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), rows, width)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, as reference.layer_norm, into a new tensor.

    x [..., hidden] float32 or bfloat16, contiguous; weight and bias [hidden] float32.
    """
    shape = x.shape
    width = shape[-1] if shape else 0
    code = DTYPE_CODES.get(x.dtype)
    if (
        code is None
        or not shape
        or not (x.is_contiguous() and x.is_cpu and _is_vector(weight, width) and _is_vector(bias, width))
    ):
        raise refusal("layer_norm", _LAYER_NORM_TAKES, x=x, weight=weight, bias=bias)
    if native is None:
        return reference.layer_norm(x, weight, bias, eps)
    out = empty(shape, x.dtype)
    rows = x.numel() // (width or 1)
    native.layer_norm(code, x.data_ptr(), 0, weight.data_ptr(), bias.data_ptr(), eps, out.data_ptr(), rows, width)
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then LayerNorm of it into a new tensor; as reference.add_layer_norm.

    x, residual [..., hidden] contiguous, of one dtype; weight and bias [hidden] float32.
    """
    shape = x.shape
    width = shape[-1] if shape else 0
    code = DTYPE_CODES.get(x.dtype)
    if (
        code is None
        or not shape
        or not (_are_rows(x, residual) and _is_vector(weight, width) and _is_vector(bias, width))
    ):
        raise refusal("add_layer_norm", _ADD_TAKES, x=x, residual=residual, weight=weight, bias=bias)
    if native is None:
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    out = empty(shape, x.dtype)
    native.layer_norm(
        code,
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        eps,
        out.data_ptr(),
        x.numel() // (width or 1),
        width,
    )
    return out


def _is_vector(weight: Tensor, width: int) -> bool:
    return (
        weight.dtype is _FLOAT32
        and weight.dim() == 1
        and weight.numel() == width
        and weight.is_contiguous()
        and weight.is_cpu
    )


def _are_rows(x: Tensor, residual: Tensor) -> bool:
    return (
        x.shape == residual.shape
        and x.dtype is residual.dtype
        and x.is_contiguous()
        and residual.is_contiguous()
        and x.is_cpu
        and residual.is_cpu
    )


_WEIGHTS = "float32 weight (and bias) [hidden], contiguous, on the CPU"
_RMS_NORM_TAKES = (
    "x [..., hidden] float32 or bfloat16, contiguous or [num_tokens, num_heads, head_dim] with stride 1 in the last "
    f"dimension, and a {_WEIGHTS}"
)
_LAYER_NORM_TAKES = f"x [..., hidden] float32 or bfloat16, contiguous, and a {_WEIGHTS}"
_ADD_TAKES = (
    "x and residual [..., hidden] of equal shape and dtype, float32 or bfloat16, contiguous, on the CPU; for a norm, "
    f"{_WEIGHTS}"
)
