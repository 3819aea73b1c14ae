"""Elementwise activations, and their product with a second half (SwiGLU and its relatives)."""

from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.checks import ACTIVATIONS, DTYPES, refusal


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply `kind` to each element of x [..., width] float32 or bfloat16, contiguous, into a new tensor."""
    if x.dtype not in DTYPES or kind not in ACTIVATIONS or not x.is_contiguous():
        raise refusal("activation", f"x [..., width] {_TAKES}", x=x, kind=kind)
    return backend_of(x).activation(x, kind)


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """`act(gate) * up` for x = [gate | up]: [num_tokens, 2 * width] contiguous -> [num_tokens, width]."""
    shape = x.shape
    if x.dtype not in DTYPES or kind not in ACTIVATIONS or len(shape) != 2 or shape[1] % 2 or not x.is_contiguous():
        raise refusal("gated_activation", f"x [num_tokens, 2 * width] {_TAKES}", x=x, kind=kind)
    return backend_of(x).gated_activation(x, kind)


_TAKES = f"float32 or bfloat16, contiguous, and a kind of {', '.join(ACTIVATIONS)}"
