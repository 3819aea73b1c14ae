"""Rotary position embedding, in place."""

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import check_range, native_errors, refusal


def rotary_embedding(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate the first rotary_dim dimensions of every head in place, as reference.rotary_embedding.

    x [num_tokens, num_heads, head_dim] float32 or bfloat16, of which only the last dimension must be contiguous (a
    slice of a fused qkv); positions [num_tokens] int64; cos_sin [max_positions, rotary_dim] float32, contiguous.
    """
    code = DTYPE_CODES.get(x.dtype)
    if code is None or not _fit(x, positions, cos_sin):
        raise refusal("rotary_embedding", _TAKES, x=x, positions=positions, cos_sin=cos_sin)
    max_positions, rotary_dim = cos_sin.shape
    if native is None:
        check_range("rotary_embedding: position", positions, max_positions)
        return reference.rotary_embedding(x, positions, cos_sin)
    tokens, heads, _ = x.shape
    token_stride, head_stride, _ = x.stride()
    with native_errors():
        native.rotary(
            code,
            x.data_ptr(),
            tokens,
            heads,
            token_stride,
            head_stride,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            max_positions,
            rotary_dim,
        )


def _fit(x: Tensor, positions: Tensor, cos_sin: Tensor) -> bool:
    return (
        x.dim() == 3
        and cos_sin.dim() == 2
        and (x.stride(2) == 1 or x.shape[2] == 1)
        and positions.dtype is torch.int64
        and positions.shape == x.shape[:1]
        and positions.is_contiguous()
        and cos_sin.dtype is torch.float32
        and cos_sin.shape[1] <= x.shape[2]
        and cos_sin.shape[1] % 2 == 0
        and cos_sin.is_contiguous()
        and x.is_cpu
        and positions.is_cpu
        and cos_sin.is_cpu
    )


_TAKES = (
    "x [num_tokens, num_heads, head_dim] float32 or bfloat16 with stride 1 in the last dimension, contiguous positions "
    "[num_tokens] int64 and contiguous cos_sin [max_positions, rotary_dim] float32 with an even rotary_dim up to "
    "head_dim, on the CPU"
)
