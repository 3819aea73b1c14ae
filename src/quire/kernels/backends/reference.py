"""The definition of what every kernel computes, in plain torch. The native kernels are tested against it.

It is written to be read, and works on any torch device; it serves, slowly, where the native extension could not be
built or loaded. Arithmetic is in float32 whatever the storage dtype; results are rounded once, at the end. The bits of
a row may depend on the batch here, since torch may choose another order of summation for another batch size. Values
out of range, such as ids, raise KernelError.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backends import reference_blocks, reference_rotation
from quire.kernels.checks import check_range
from quire.kernels.experts.weights import Routing
from quire.kernels.variants import XIELU, ActivationKind, ClampedSwiGLU


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias`: x [num_tokens, k], weight [n, k], bias [n] float32 -> [num_tokens, n] in `out_dtype`."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(out_dtype)


def with_lora(out: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    """`out + B (A x)` for rows of one adapter: x [num_tokens, k], a [sum of ranks, k], b of each module [n, rank], out
    [num_tokens, sum of n], which was rounded before."""
    shrunk = torch.split(x.float() @ a.float().T, list(ranks), dim=1)
    added = torch.cat([part @ each.float().T for part, each in zip(shrunk, b, strict=True)], dim=1)
    return (out.float() + added).to(out.dtype)


def group_size(k: int, format: str) -> int:
    """How many weights along k share a scale: all of a row in `int8`, 32 in `int4`."""
    return max(k, 1) if format == "int8" else 32


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [rows, k] -> int8 [rows, num_groups, group], zeros at the end, and scales [rows, num_groups] float32.

    The largest magnitude of a group becomes 127, the others the nearest (even) integer on that scale. A group that
    holds something not finite has the scale NaN; one without anything larger than 1e-30 is all zeros.
    """
    x = _in_groups(x, group)
    largest = x.abs().amax(2)
    is_plain = (largest > 1e-30) & largest.isfinite()
    inverse = torch.where(is_plain, torch.tensor(127.0) / largest, 0)  # (127 / tensor multiplies by a reciprocal)
    values = (x.where(is_plain[..., None], 0) * inverse[..., None]).round().to(torch.int8)
    return values, torch.where(largest.isfinite(), largest / 127, torch.nan)


def quantize_weight(weight: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight [n, k] -> integers [n, num_groups, group] int8, scales [n, num_groups] float32, and the factors of x.

    `int8`: quantize_rows of the rotated weight, one group per row. `int4`: integers in [-8, 7]; each group of 32 takes
    the bfloat16 scale of least squared error among 16 that send the weight of largest magnitude to -8 or 7, times 0.7
    to 1.05, and the least squares scale of the best of them; x is not rotated, so there are no factors.
    """
    group = group_size(weight.shape[1], format)
    if format == "int8":
        of_x = reference_rotation.factors(weight)
        rotated = reference_rotation.rotate(weight, reference_rotation.factors_of_weight(of_x))
        return *quantize_rows(rotated, group), of_x
    w = _in_groups(weight, group)
    extreme = w.gather(2, w.abs().argmax(2, keepdim=True))[..., 0]
    factors = [torch.tensor(14.0 + step) / 20 for step in range(8)]
    tries = [extreme * (factor / end) for factor in factors for end in (-8, 7)]
    best = _Rounding.of(w, tries[0])
    for scale in tries[1:]:
        best = best.or_better(_Rounding.of(w, scale))
    products, squares = (_sum_in_order(term * best.integers) for term in (w, best.integers))
    best = best.or_better(_Rounding.of(w, products / squares.clamp(min=1)))
    return best.integers.to(torch.int8), best.scale, None


def _in_groups(x: Tensor, group: int) -> Tensor:
    """x [rows, k] -> [rows, num_groups, group] float32, zeros at the end."""
    rows, k = x.shape
    return F.pad(x.float(), (0, -k % group)).view(rows, -(-k // group), group)


class _Rounding(NamedTuple):
    """Groups of weights as integers times a scale, and how far off that is."""

    integers: Tensor
    scale: Tensor
    error: Tensor

    @classmethod
    def of(cls, w: Tensor, scale: Tensor) -> "_Rounding":
        scale = scale.bfloat16().float()
        inverse = torch.where(scale.abs() > 1e-30, 1 / scale, 0)
        integers = (w * inverse[..., None]).round().clamp(-8, 7)
        return cls(integers, scale, _sum_in_order((w - integers * scale[..., None]).square()))

    def or_better(self, other: "_Rounding") -> "_Rounding":
        is_better = other.error < self.error
        integers = torch.where(is_better[..., None], other.integers, self.integers)
        return _Rounding(
            integers, torch.where(is_better, other.scale, self.scale), torch.minimum(other.error, self.error)
        )


def _sum_in_order(terms: Tensor) -> Tensor:
    """The sum over the last dimension, term by term: near ties must fall as in the native kernels."""
    total = terms.new_zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        total = total + term
    return total


def quantized_matmul(
    x: Tensor,
    integers: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` for a weight of integers [n, num_groups, group] times scales [n, num_groups] minus mins,
    x [num_tokens, k] being quantized in the same groups, and rotated before if there are factors [k] for that.

    Integers are multiplied and summed exactly. Each group's sum is rounded to float32 and scaled; those are added in
    order. So are the products of mins and sums of x, whose sum is subtracted then. A row with an infinity or a NaN
    gives NaNs.
    """
    x = x if factors is None else reference_rotation.rotate(x, factors)
    x_integers, x_scales = quantize_rows(x, integers.shape[2])
    x_sums = x_integers.sum(2, dtype=torch.float32) * x_scales
    out = scales.new_zeros(x.shape[0], integers.shape[0])
    minus = torch.zeros_like(out)
    for group in range(integers.shape[1]):
        exact = x_integers[:, group].double() @ integers[:, group].double().T
        out = out + exact.float() * (x_scales[:, group, None] * scales[:, group])
        if mins is not None:
            minus = minus + x_sums[:, group, None] * mins[:, group]
    out = out if mins is None else out - minus
    return (out if bias is None else out + bias).to(out_dtype)


def split_integers(
    integers: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, scale_range: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As kernels.pack_integers, to integers [n, num_groups, group] int16, scales and mins [n, num_groups] float32.

    Groups are of 32, and of 128 where integers have 4 bits and both k and `scale_range` are multiples of 128.
    """
    if scales.dtype is torch.uint8:
        numbers = reference_blocks.doubled_float4(integers)
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 128)
    else:
        numbers, scales = integers.to(torch.int16), scales.float()
        numbers = numbers if zeros is not None else numbers - 2 ** (bits - 1)
    k = integers.shape[1]
    group = 128 if bits == 4 and k % 128 == 0 and min(scale_range, k) % 128 == 0 else 32
    groups = -(-k // group)
    per_group = torch.arange(groups) * group // scale_range
    scales = scales[:, per_group]
    mins = None if zeros is None else zeros[:, per_group] * scales
    return F.pad(numbers, (0, -k % group)).view(-1, groups, group), scales, mins


def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights, as Routing says: logits [num_tokens, num_experts] ->
    [num_tokens, top_k] int32 and float32. Of equal ones the first is chosen; a NaN counts as -inf."""
    scores = torch.sigmoid(logits) if routing.scoring == "sigmoid" else torch.softmax(logits, 1)
    chosen_by = logits if bias is None and not routing.has_pairs else scores  # of the same order, but without ties
    chosen_by = chosen_by if bias is None else chosen_by + bias
    chosen_by = chosen_by.where(~chosen_by.isnan(), -torch.inf)
    ids = chosen_by.argsort(dim=1, descending=True, stable=True)
    if routing.num_groups > 1:
        groups = (
            chosen_by.view(len(logits), routing.num_groups, logits.shape[1] // routing.num_groups)
            .sort(2, descending=True)
            .values
        )
        of_group = groups[:, :, :2].sum(2) if routing.has_pairs else groups[:, :, 0]
        top = of_group.argsort(dim=1, descending=True, stable=True)[:, : routing.top_groups]
        is_in = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, top, torch.ones_like(top, dtype=torch.bool))
        is_out = ~is_in.gather(1, ids // groups.shape[2])
        ids = ids.gather(1, is_out.int().argsort(dim=1, stable=True))
    ids = ids[:, : routing.top_k]
    weights = _shares(logits, ids, routing.jitter) if routing.scoring == "sparsemixer" else scores.gather(1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids.int(), weights * routing.scale


def _shares(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Of each chosen logit, its share in a softmax over those that are left when it is chosen, and near it."""
    left, shares = logits, []
    for index in ids.T[:, :, None]:
        highest = logits.gather(1, index)
        is_far = (highest - logits) / torch.maximum(logits.abs(), highest) > 2 * jitter
        shares.append(torch.softmax(left.masked_fill(is_far, -torch.inf), 1).gather(1, index))
        left = left.scatter(1, index, -torch.inf)
    return torch.cat(shares, 1)


def combine_experts(y: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """The sums over each token's experts of results times weights [num_tokens, top_k]: y [num_pairs, width], places
    [num_tokens * top_k] -> [num_tokens, width]. `shared` is added, times the sigmoid of `gate` [num_tokens, 1]."""
    results = y[places.long()].float().view(*weights.shape, y.shape[1])  # [num_tokens, top_k, width]
    out = (results * weights[:, :, None]).sum(1)
    if shared is not None:
        out = out + (shared.float() if gate is None else shared.float() * torch.sigmoid(gate))
    return out.to(y.dtype)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [vocab, hidden] by token_ids [num_tokens] -> [num_tokens, hidden]."""
    check_range("embedding: token id", token_ids, table.shape[0])
    return table[token_ids.long()]


def add(x: Tensor, residual: Tensor) -> None:
    """`residual += x` in place, rounded to its dtype."""
    residual.copy_((residual.float() + x.float()).to(residual.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019); weight [hidden] float32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, rounded to its dtype; then the norm of that rounded residual."""
    add(x, residual)
    return rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension (Ba et al. 2016); weight and bias (or none) [hidden] float32."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`residual += x` in place, rounded to its dtype; then the norm of that rounded residual."""
    add(x, residual)
    return layer_norm(residual, weight, bias, eps)


def head_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm of each head, by weights and biases (or none) of its own, [num_heads, head_dim] float32."""
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def scale(x: Tensor, factor: float) -> None:
    """`x *= factor` in place, rounded to its dtype; the factor is a float32."""
    x.copy_((x.float() * torch.tensor(factor)).to(x.dtype))


def clip(x: Tensor, limit: float) -> None:
    """Elements outside of [-limit, limit] become the nearer end, in place; a NaN stays NaN."""
    x.clamp_(-limit, limit)


def softcap(x: Tensor, cap: float) -> None:
    """`x = cap * tanh(x / cap)` in place, x float32 (Bello et al. 2016)."""
    x.copy_(cap * torch.tanh(x / cap))


def rotary_embedding(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """Rotate heads in place (Su et al. 2021), in the half-split pairing (i, i + rotary_dim / 2) of NeoX and Llama, or,
    if `interleaved`, the pairs (2 i, 2 i + 1) of GPT-J.

    x [num_tokens, num_heads, head_dim]; positions [num_tokens]; cos_sin [max_positions, rotary_dim] float32, cosines in
    the first half, sines in the second. Dimensions past rotary_dim stay as they are.
    """
    check_range("rotary_embedding: position", positions, cos_sin.shape[0])
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    half, dim = rotary_dim // 2, -1 if interleaved else -2
    pairs = x[..., :rotary_dim].float().view(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.unbind(dim)
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=dim)
    x[..., :rotary_dim] = rotated.flatten(-2).to(x.dtype)


def gated_activation(x: Tensor, kind: ActivationKind, out: Tensor | None = None) -> Tensor:
    """`act(gate) * up` for x = [gate | up]: [num_tokens, 2 * width] -> [num_tokens, width]."""
    gate, up = x.float().chunk(2, dim=-1)
    if isinstance(kind, ClampedSwiGLU):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit) + 1
        result = gate * torch.sigmoid(kind.alpha * gate) * up
    else:
        result = _activated(gate, kind) * up
    return result.to(x.dtype) if out is None else out.copy_(result)


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """Elementwise: `silu`, `gelu` (exact, erf), `gelu_tanh` (its tanh approximation), `relu`, `relu2` (its square),
    `quick_gelu` (x sigmoid(1.702 x)), or an XIELU."""
    return _activated(x.float(), kind).to(x.dtype)


def _activated(x: Tensor, kind: ActivationKind) -> Tensor:
    if isinstance(kind, XIELU):
        negative = kind.alpha_n * (x.clamp(max=0).expm1() - x)
        return torch.where(x > 0, kind.alpha_p * x * x, negative) + kind.beta * x
    assert isinstance(kind, str), "the kind is not one of single elements"
    return _ACTIVATIONS[kind](x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store new keys and values in their slots.

    key, value [num_tokens, num_kv_heads, head_dim]; slots [num_tokens] (block_id * block_size + offset);
    k_cache [num_blocks, num_kv_heads, head_dim / pack, block_size, pack] where pack elements fill four bytes (the
    lanes of the dot-product instructions); v_cache [num_blocks, num_kv_heads, block_size, head_dim]. An int8 k_cache
    has two lanes more, the bytes of the float32 scales of the key and of the value, and its keys are rotated.
    """
    check_range("write_kv: slot", slots, _num_slots(v_cache))
    block_size, pack = k_cache.shape[3:]
    blocks, offsets = slots.long() // block_size, slots.long() % block_size
    if k_cache.dtype is torch.int8:
        (key, key_scale), (value, value_scale) = quantize_int8(rotate_heads(key)), quantize_int8(value)
        key = torch.cat([key, torch.cat([key_scale, value_scale], dim=-1).view(torch.int8)], dim=-1)
    k_cache[blocks, :, :, offsets] = key.reshape(*key.shape[:2], key.shape[2] // pack, pack)
    v_cache[blocks, :, offsets] = value


def rotate_heads(x: Tensor) -> Tensor:
    """Keys x [num_tokens, num_heads, head_dim] as an int8 cache rounds them, rotated; or rotated ones as they were."""
    head_dim = x.shape[-1]
    return reference_rotation.rotate(x.reshape(-1, head_dim), 1 / reference_rotation.roots(head_dim)).view(x.shape)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., width] as int8 multiples, rounded to nearest even, of a float32 scale [..., 1]: the largest |x| / 127."""
    largest = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, torch.tensor(127.0) / largest, 0)  # 127 / tensor would round twice
    return (x.float() * inverse).round().to(torch.int8), largest / 127


def gather_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `write_kv`: keys and values [num_tokens, num_kv_heads, head_dim] read back from their slots.

    Those of an int8 cache are float32.
    """
    check_range("gather_kv: slot", slots, _num_slots(v_cache))
    block_size = k_cache.shape[3]
    blocks, offsets = slots.long() // block_size, slots.long() % block_size
    key, value = k_cache[blocks, :, :, offsets].flatten(2), v_cache[blocks, :, offsets]
    if key.dtype is not torch.int8:
        return key, value
    scales = key[..., -8:].contiguous().view(torch.float32)
    return rotate_heads(key[..., :-8] * scales[..., :1]), value * scales[..., 1:]


def copy_blocks(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """`dst[d] = src[s]` for each (s, d) of pairs [num_pairs, 2]; src, dst [num_blocks, block_bytes] uint8.

    Used for copy-on-write (src is dst) and for swapping (two pools). No block is both read and written in one call.
    """
    check_range("copy_blocks: source block", pairs[:, 0], src.shape[0])
    check_range("copy_blocks: destination block", pairs[:, 1], dst.shape[0])
    dst[pairs[:, 1].long()] = src[pairs[:, 0].long()]


def copy_slots(k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy the keys and values of single tokens from src_slots to dst_slots, each [num_tokens].

    Used to reuse part of a block that another sequence computed. No slot is both read and written in one call.
    """
    check_range("copy_slots: source slot", src_slots, _num_slots(v_cache))
    check_range("copy_slots: destination slot", dst_slots, _num_slots(v_cache))
    block_size = k_cache.shape[3]
    (src, src_at), (dst, dst_at) = ((s.long() // block_size, s.long() % block_size) for s in (src_slots, dst_slots))
    k_cache[dst, :, :, dst_at] = k_cache[src, :, :, src_at]
    v_cache[dst, :, dst_at] = v_cache[src, :, src_at]


def _num_slots(v_cache: Tensor) -> int:
    return v_cache.shape[0] * v_cache.shape[2]
