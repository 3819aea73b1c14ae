"""Rotary position embedding, in place."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, kernel_errors, refusal


def rotary_embedding(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate the first rotary_dim dimensions of every head in place, as reference.rotary_embedding.

    x [num_tokens, num_heads, head_dim] float32 or bfloat16, of which only the last dimension must be contiguous (a
    slice of a fused qkv); positions [num_tokens] int64; cos_sin [max_positions, rotary_dim] float32, contiguous.
    """
    backend = backend_of(x)
    if not _fit(backend, x, positions, cos_sin):
        raise refusal("rotary_embedding", _TAKES, x=x, positions=positions, cos_sin=cos_sin)
    with kernel_errors():
        backend.rotary_embedding(x, positions, cos_sin)


def _fit(backend: Backend, x: Tensor, positions: Tensor, cos_sin: Tensor) -> bool:
    shape, table = x.shape, cos_sin.shape
    return (
        x.dtype in DTYPES
        and len(shape) == 3
        and len(table) == 2
        and (x.is_contiguous() or x.stride(2) == 1 or shape[2] == 1)
        and positions.dtype is torch.int64
        and positions.shape == shape[:1]
        and positions.is_contiguous()
        and cos_sin.dtype is torch.float32
        and table[1] <= shape[2]
        and table[1] % 2 == 0
        and cos_sin.is_contiguous()
        and backend.holds(positions)
        and backend.holds(cos_sin)
    )


_TAKES = (
    "x [num_tokens, num_heads, head_dim] float32 or bfloat16 with stride 1 in the last dimension, contiguous positions "
    "[num_tokens] int64 and contiguous cos_sin [max_positions, rotary_dim] float32 with an even rotary_dim up to "
    "head_dim, on one device"
)
