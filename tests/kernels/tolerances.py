"""How far a native kernel may be from the torch reference: relative and absolute, per kernel and dtype.

The reference rounds once, on the way out; so do the native kernels, after summing in another order. A bfloat16 result
may therefore fall on the neighbouring value (relative 2^-7), and near zero differ by what float32 sums differ by.
"""

import torch
from torch import Tensor

TOLERANCES: dict[tuple[str, torch.dtype], tuple[float, float]] = {
    ("paged_attention", torch.float32): (1e-5, 1e-5),
    ("paged_attention", torch.bfloat16): (2**-7, 1e-5),
}


def assert_close(kernel: str, actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[kernel, expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
