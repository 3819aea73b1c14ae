"""Elementwise activations, and their product with a second half (SwiGLU and its relatives)."""

from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.checks import ACTIVATIONS, DTYPES, refusal
from quire.kernels.variants import XIELU, ActivationKind, ClampedSwiGLU


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """Apply `kind` to each element of x [..., width] float32 or bfloat16, contiguous, into a new tensor."""
    if x.dtype not in DTYPES or not _is_plain(kind) or not x.is_contiguous():
        raise refusal("activation", f"x [..., width] {_TAKES} or an XIELU", x=x, kind=kind)
    return backend_of(x).activation(x, kind)


def gated_activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """`act(gate) * up` for x = [gate | up]: [num_tokens, 2 * width] contiguous -> [num_tokens, width].

    A ClampedSwiGLU clamps both halves first and adds one to `up`.
    """
    shape, is_kind = x.shape, _is_plain(kind) or isinstance(kind, ClampedSwiGLU)
    if x.dtype not in DTYPES or not is_kind or len(shape) != 2 or shape[1] % 2 or not x.is_contiguous():
        takes = f"x [num_tokens, 2 * width] {_TAKES}, an XIELU or a ClampedSwiGLU"
        raise refusal("gated_activation", takes, x=x, kind=kind)
    return backend_of(x).gated_activation(x, kind)


def _is_plain(kind: ActivationKind) -> bool:
    return kind in ACTIVATIONS if isinstance(kind, str) else isinstance(kind, XIELU)


_TAKES = f"float32 or bfloat16, contiguous, and a kind of {', '.join(ACTIVATIONS)}"
