"""Elementwise activations, and their product with a second half (SwiGLU and its relatives)."""

from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import refusal
from quire.kernels.workspace import empty

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

_KIND_CODES = {kind: code for code, kind in enumerate(ACTIVATIONS)}


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply `kind` to each element of x [..., width] float32 or bfloat16, contiguous, into a new tensor."""
    code = DTYPE_CODES.get(x.dtype)
    kind_code = _KIND_CODES.get(kind)
    if code is None or kind_code is None or not (x.is_contiguous() and x.is_cpu):
        raise refusal("activation", f"x [..., width] {_TAKES}", x=x, kind=kind)
    if native is None:
        return reference.activation(x, kind)
    out = empty(x.shape, x.dtype)
    width = x.shape[-1] if x.dim() else 1
    native.activation(code, kind_code, x.data_ptr(), x.numel() // (width or 1), width, out.data_ptr())
    return out


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """`act(gate) * up` for x = [gate | up]: [num_tokens, 2 * width] contiguous -> [num_tokens, width]."""
    code = DTYPE_CODES.get(x.dtype)
    kind_code = _KIND_CODES.get(kind)
    if code is None or kind_code is None or not (x.dim() == 2 and x.is_contiguous() and x.is_cpu):
        raise refusal("gated_activation", f"x [num_tokens, 2 * width] {_TAKES}", x=x, kind=kind)
    rows, double_width = x.shape
    width = double_width // 2
    if 2 * width != double_width:
        raise refusal("gated_activation", f"x [num_tokens, 2 * width] {_TAKES}", x=x, kind=kind)
    if native is None:
        return reference.gated_activation(x, kind)
    out = empty((rows, width), x.dtype)
    native.gated_activation(code, kind_code, x.data_ptr(), rows, width, out.data_ptr())
    return out


_TAKES = f"float32 or bfloat16, contiguous, on the CPU, and a kind of {', '.join(ACTIVATIONS)}"
