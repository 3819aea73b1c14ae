"""RMSNorm and LayerNorm, with and without a residual added first."""

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import refusal


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, as reference.rms_norm, into a new contiguous tensor.

    x [..., hidden] contiguous, or a view [num_tokens, num_heads, head_dim] with any strides but 1 in the last dimension;
    weight [hidden] float32.
    """
    if native is None:
        return reference.rms_norm(x, weight, eps)
    code = DTYPE_CODES.get(x.dtype)
    shape = x.shape
    width = shape[-1]
    if x.is_contiguous():
        rows, inner, outer_stride, inner_stride = x.numel() // (width or 1), 1, width, width
    elif x.dim() == 3 and x.stride(2) == 1:
        rows, inner, _ = shape
        outer_stride, inner_stride, _ = x.stride()
    else:
        code = None
    if (
        code is None
        or not (x.is_cpu and weight.is_cpu)
        or weight.dtype is not torch.float32
        or weight.shape != (width,)
        or not weight.is_contiguous()
    ):
        raise refusal("rms_norm", _RMS_NORM_TAKES, x=x, weight=weight)
    out = torch.empty(shape, dtype=x.dtype)
    native.rms_norm(
        code, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), rows, inner, outer_stride, inner_stride, width
    )
    return out


_RMS_NORM_TAKES = (
    "x [..., hidden] float32 or bfloat16, contiguous or [num_tokens, num_heads, head_dim] with stride 1 in the last "
    "dimension, and a contiguous float32 weight [hidden], on the CPU"
)
