"""Matrix multiplication by weights that are packed once, at load, into the layout the kernel streams."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, KERNEL_ERRORS, are_numbers, is_place, refusal
from quire.kernels.elementwise import takes_kind
from quire.kernels.variants import Activated
from quire.kernels.weights import HeadWeights, Matrix, PackedWeight, QuantizedWeight, StackedWeight


def pack_weight(weight: Tensor) -> PackedWeight:
    """Copy `weight` [n, k] float32 or bfloat16 into the kernels' layout.

    Rows must be contiguous in themselves; they may be strided and at any alignment (a memory-mapped file).
    """
    if weight.dtype not in DTYPES or weight.dim() != 2 or (weight.stride(1) != 1 and weight.shape[1] > 1):
        raise refusal("pack_weight", "weight [n, k] float32 or bfloat16 with stride 1 in k", weight=weight)
    return backend_of(weight).pack_weight(weight)


def unpack_weight(packed: PackedWeight) -> Tensor:
    """The weight [n, k] that was packed."""
    return backend_of(packed.data).unpack_weight(packed)


def matmul(
    x: Tensor,
    packed: Matrix,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, accumulated in float32: x [num_tokens, k] -> [num_tokens, n] in out_dtype (default: x's).

    x has the weight's dtype and contiguous rows, which may be strided; bias [n] float32. By a quantized weight, x is
    multiplied quantized too, as `reference.quantized_matmul` says. `out`: where the result is written, if not in memory
    of its own; its rows may be strided.
    """
    backend = backend_of(x)
    if out_dtype is None:
        out_dtype = packed.dtype if out is None else out.dtype
    shape, k = x.shape, packed.k
    if (
        len(shape) != 2
        or shape[1] != k
        or x.dtype is not packed.dtype
        or not backend.holds(packed.data)
        or out_dtype not in DTYPES
        or not (x.is_contiguous() or k <= 1 or x.stride(1) == 1)
        or not are_numbers(backend.holds, (packed.n,), bias)
        or (out is not None and not is_place(out, shape[0], packed.n, out_dtype, backend.holds))
    ):
        raise _refusal(x, packed, bias, out_dtype, out)
    with KERNEL_ERRORS:
        if out is None:
            out = backend.empty((shape[0], packed.n), out_dtype)
        if isinstance(packed, StackedWeight):
            start = 0
            for part in packed.parts:
                end = start + part.n
                _multiply(backend, x, part, None if bias is None else bias[start:end], out[:, start:end])
                start = end
        else:
            _multiply(backend, x, packed, bias, out)
    return out


def activated_matmul(x: Tensor, activated: Activated, packed: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`matmul` of what an activation makes of x, [num_tokens, k] or, if it is gated, [num_tokens, 2 * k], contiguous.

    Nothing is written between the two: a row is rounded where it was made.
    """
    backend, shape = backend_of(x), x.shape
    if (
        len(shape) != 2
        or shape[1] != packed.k * (2 if activated.is_gated else 1)
        or x.dtype is not packed.dtype
        or not isinstance(packed, QuantizedWeight)
        or not x.is_contiguous()
        or not backend.holds(packed.data)
        or not takes_kind(activated.kind, is_gated=activated.is_gated)
        or not are_numbers(backend.holds, (packed.n,), bias)
    ):
        takes = (
            f"contiguous x [num_tokens, {packed.k}], or twice as wide for a gated activation, of {packed.dtype} on "
            f"{packed.data.device}, a kind of activation, a quantized weight, and a contiguous float32 bias "
            f"[{packed.n}] or None"
        )
        raise refusal("activated_matmul", takes, x=x, activated=activated, bias=bias)
    with KERNEL_ERRORS:
        out = backend.empty((shape[0], packed.n), packed.dtype)
        backend.quantized_matmul(x, packed, bias, out, activated)
    return out


def pack_heads(weights: Tensor) -> HeadWeights:
    """Copy a matrix for each head, [num_heads, n, k] float32 or bfloat16 of stride 1 in k, into the kernels' layout."""
    shape = weights.shape
    if weights.dtype not in DTYPES or len(shape) != 3 or min(shape) < 1 or (weights.stride(2) != 1 and shape[2] > 1):
        raise refusal("pack_heads", "weights [num_heads, n, k] float32 or bfloat16 with stride 1 in k", weights=weights)
    return backend_of(weights).latent.pack_heads(weights)


def multiply_heads(x: Tensor, weights: HeadWeights) -> Tensor:
    """Each head's rows times its own matrix, accumulated in float32: x [num_tokens, num_heads, k + tail] ->
    [num_tokens, num_heads, n + tail]. What x has beyond k stands behind the products, as it is.

    x has the weights' dtype and any strides but in its last dimension. A row's bits depend on nothing but the row.
    """
    backend = backend_of(x)
    fits = (
        x.dim() == 3
        and x.dtype is weights.dtype
        and x.shape[1] == weights.num_heads
        and x.shape[2] >= weights.k
        and (x.is_contiguous() or x.stride(2) == 1)
        and backend.holds(weights.data)
    )
    if not fits:
        takes = (
            f"x [num_tokens, {weights.num_heads}, at least {weights.k}] {weights.dtype} with stride 1 in the last "
            "dimension, on the device of the weights"
        )
        raise refusal("multiply_heads", takes, x=x)
    with KERNEL_ERRORS:
        return backend.latent.multiply_heads(x, weights)


def matmul_heads(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """As matmul, of each head by a matrix [n, k] of its own: x [num_tokens, num_heads, k], of any stride from token to
    token -> [num_tokens, num_heads, n] float32."""
    backend = backend_of(x)
    forms = {(w.n, w.k, w.dtype) if isinstance(w, PackedWeight) and backend.holds(w.data) else None for w in weights}
    (form, *others), k = forms or {None}, x.shape[-1] if x.dim() else 0
    if (
        form is None
        or others
        or x.dim() != 3
        or (x.shape[1], *form[1:]) != (len(weights), k, x.dtype)
        or (x.stride(2) != 1 and k > 1)
    ):
        takes = (
            "x [num_tokens, num_heads, k] of stride 1 in k, and for each head a packed weight [n, k] of x's dtype on "
            "its device"
        )
        raise refusal("matmul_heads", takes, x=x, num_heads=len(weights), forms=forms)
    with KERNEL_ERRORS:
        out = backend.empty((x.shape[0], len(weights), form[0]), torch.float32)
        for head, weight in enumerate(weights):
            backend.matmul(x[:, head], weight, None, out[:, head])
    return out


def _multiply(
    backend: Backend, x: Tensor, packed: PackedWeight | QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    if isinstance(packed, PackedWeight):
        backend.matmul(x, packed, bias, out)
    else:
        backend.quantized_matmul(x, packed, bias, out)


def _refusal(x: Tensor, packed: Matrix, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None) -> Exception:
    dtype = str(packed.dtype).removeprefix("torch.")
    takes = (
        f"x [num_tokens, {packed.k}] {dtype} with stride 1 in the last dimension for this weight "
        f"[{packed.n}, {packed.k}] {dtype} on {packed.data.device}, a contiguous float32 bias [{packed.n}] or None, on "
        f"the same device, out_dtype float32 or bfloat16, and None or out [num_tokens, {packed.n}] of that dtype"
    )
    return refusal("matmul", takes, x=x, bias=bias, out_dtype=out_dtype, out=out)
