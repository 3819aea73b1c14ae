"""Kernels that work on each row of activations alone: the residual sum, norms, activations, scaling, soft caps."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import ACTIVATIONS, DTYPES, are_numbers, is_cap, is_place, refusal
from quire.kernels.variants import XIELU, ActivationKind, ClampedSwiGLU


def add(x: Tensor, residual: Tensor) -> None:
    """`residual += x` in place; x, residual [..., hidden] contiguous, of one dtype."""
    backend = backend_of(x)
    if not _are_rows(backend, x.shape, x, residual):
        raise refusal("add", _ADD_TAKES, x=x, residual=residual)
    backend.add(x, residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, as reference.rms_norm, into a new contiguous tensor.

    x [..., hidden] float32 or bfloat16, contiguous, or a view [num_tokens, num_heads, head_dim] of which only the last
    dimension is; weight [hidden] float32.
    """
    backend, shape = backend_of(x), x.shape
    if (
        not shape
        or x.dtype not in DTYPES
        or not (x.is_contiguous() or (len(shape) == 3 and x.stride(2) == 1))
        or not are_numbers(backend.holds, (shape[-1],), weight)
    ):
        raise refusal("rms_norm", _RMS_NORM_TAKES, x=x, weight=weight)
    return backend.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then RMSNorm of it into a new tensor; as reference.add_rms_norm.

    x, residual [..., hidden] contiguous, of one dtype; weight [hidden] float32.
    """
    backend, shape = backend_of(x), x.shape
    if not (_are_rows(backend, shape, x, residual) and are_numbers(backend.holds, (shape[-1],), weight)):
        raise refusal("add_rms_norm", _ADD_TAKES, x=x, residual=residual, weight=weight)
    return backend.add_rms_norm(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension, as reference.layer_norm, into a new tensor.

    x [..., hidden] float32 or bfloat16, contiguous; weight and bias [hidden] float32; no bias: None.
    """
    backend, shape = backend_of(x), x.shape
    is_row = shape and x.dtype in DTYPES and x.is_contiguous()
    if not is_row or not are_numbers(backend.holds, (shape[-1],), weight, bias):
        raise refusal("layer_norm", _LAYER_NORM_TAKES, x=x, weight=weight, bias=bias)
    return backend.layer_norm(x, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`residual += x` in place, then LayerNorm of it into a new tensor; as reference.add_layer_norm.

    x, residual [..., hidden] contiguous, of one dtype; weight and bias [hidden] float32; no bias: None.
    """
    backend, shape = backend_of(x), x.shape
    if not (_are_rows(backend, shape, x, residual) and are_numbers(backend.holds, (shape[-1],), weight, bias)):
        raise refusal("add_layer_norm", _ADD_TAKES, x=x, residual=residual, weight=weight, bias=bias)
    return backend.add_layer_norm(x, residual, weight, bias, eps)


def head_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of each head by weights of its own, as reference.head_layer_norm, into a new contiguous tensor.

    x [num_tokens, num_heads, head_dim] float32 or bfloat16, of which only the last dimension must be contiguous; weight
    and bias [num_heads, head_dim] float32; no bias: None.
    """
    backend = backend_of(x)
    if (
        x.dim() != 3
        or x.dtype not in DTYPES
        or x.stride(2) != 1
        or not are_numbers(backend.holds, x.shape[1:], weight, bias)
    ):
        raise refusal("head_layer_norm", _HEAD_LAYER_NORM_TAKES, x=x, weight=weight, bias=bias)
    return backend.head_layer_norm(x, weight, bias, eps)


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """Apply `kind` to each element of x [..., width] float32 or bfloat16, contiguous, into a new tensor."""
    if x.dtype not in DTYPES or not takes_kind(kind, is_gated=False) or not x.is_contiguous():
        raise refusal("activation", f"x [..., width] {_ACTIVATION_TAKES} or an XIELU", x=x, kind=kind)
    return backend_of(x).activation(x, kind)


def takes_kind(kind: ActivationKind, *, is_gated: bool) -> bool:
    """Whether `activation` or `gated_activation` knows the kind."""
    is_plain = kind in ACTIVATIONS if isinstance(kind, str) else isinstance(kind, XIELU)
    return is_plain or (is_gated and isinstance(kind, ClampedSwiGLU))


def gated_activation(x: Tensor, kind: ActivationKind, out: Tensor | None = None) -> Tensor:
    """`act(gate) * up` for x = [gate | up]: [num_tokens, 2 * width] contiguous -> [num_tokens, width].

    A ClampedSwiGLU clamps both halves first and adds one to `up`. `out`: where the result is written, if not in memory
    of its own; of x's dtype, with stride 1 in a row.
    """
    shape, is_kind = x.shape, takes_kind(kind, is_gated=True)
    if (
        x.dtype not in DTYPES
        or not is_kind
        or len(shape) != 2
        or shape[1] % 2
        or not x.is_contiguous()
        or (out is not None and not is_place(out, shape[0], shape[1] // 2, x.dtype, backend_of(x).holds))
    ):
        takes = (
            f"x [num_tokens, 2 * width] {_ACTIVATION_TAKES}, an XIELU or a ClampedSwiGLU, and None or out of its size"
        )
        raise refusal("gated_activation", takes, x=x, kind=kind, out=out)
    return backend_of(x).gated_activation(x, kind, out)


def scale(x: Tensor, factor: float) -> None:
    """`x *= factor` in place: the factor as a float32, the product rounded to x's dtype.

    x of any shape, float32 or bfloat16, contiguous.
    """
    if x.dtype not in DTYPES or not x.is_contiguous():
        raise refusal("scale", "x float32 or bfloat16, contiguous", x=x, factor=factor)
    backend_of(x).scale(x, factor)


def clip(x: Tensor, limit: float) -> None:
    """Elements outside of [-limit, limit] become the nearer end, in place; a NaN stays NaN.

    x of any shape, float32 or bfloat16, contiguous, or a view [num_tokens, num_heads, head_dim] in which each token's
    heads are; limit above 0, rounded to x's dtype.
    """
    is_dense = x.is_contiguous() or (x.dim() == 3 and x[:1].is_contiguous())
    if x.dtype not in DTYPES or not is_dense or not limit > 0:
        takes = "x float32 or bfloat16, contiguous or with contiguous heads of each token, and a limit above 0"
        raise refusal("clip", takes, x=x, limit=limit)
    backend_of(x).clip(x, limit)


def softcap(x: Tensor, cap: float) -> None:
    """`x = cap * tanh(x / cap)` in place, within 1e-6 of its value; x of any shape float32, contiguous; cap above 0."""
    if x.dtype is not torch.float32 or not x.is_contiguous() or not is_cap(cap):
        raise refusal("softcap", "x float32, contiguous, and a cap from 1.2e-38 to 1.7e38", x=x, cap=cap)
    backend_of(x).softcap(x, cap)


def _are_rows(backend: Backend, shape: torch.Size, x: Tensor, residual: Tensor) -> bool:
    dtype = x.dtype
    return (
        dtype in DTYPES
        and len(shape) > 0
        and shape == residual.shape
        and dtype is residual.dtype
        and x.is_contiguous()
        and residual.is_contiguous()
        and backend.holds(residual)
    )


_WEIGHTS = "float32 weight (and bias) [hidden], contiguous, on the same device"
_RMS_NORM_TAKES = (
    "x [..., hidden] float32 or bfloat16, contiguous or [num_tokens, num_heads, head_dim] with stride 1 in the last "
    f"dimension, and a {_WEIGHTS}"
)
_LAYER_NORM_TAKES = f"x [..., hidden] float32 or bfloat16, contiguous, and a {_WEIGHTS}"
_HEAD_LAYER_NORM_TAKES = (
    "x [num_tokens, num_heads, head_dim] float32 or bfloat16 with stride 1 in the last dimension, and float32 weight "
    "(and bias) [num_heads, head_dim], contiguous, on the same device"
)
_ADD_TAKES = (
    "x and residual [..., hidden] of equal shape and dtype, float32 or bfloat16, contiguous, on one device; for a "
    f"norm, {_WEIGHTS}"
)
_ACTIVATION_TAKES = f"float32 or bfloat16, contiguous, and a kind of {', '.join(ACTIVATIONS)}"
