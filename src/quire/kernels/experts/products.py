"""Mixtures of experts: routing tokens, and the products of each with the matrices of its experts.

`reference.route`, and `kernels.matmul` for each expert alone, say what is computed. The bits of a token depend on
nothing else in the batch.
"""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.checks import DTYPES, KERNEL_ERRORS, is_count, refusal
from quire.kernels.experts.weights import MAX_EXPERTS, ExpertFiles, ExpertRows, ExpertWeights, Routing


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights: [num_tokens, top_k] int32 and float32.

    logits [num_tokens, num_experts] float32, contiguous. Experts are chosen by their scores plus `bias` [num_experts]
    float32 (DeepSeek-V3's correction), which their weights do not hold. Of equal ones the lower index is chosen; a NaN
    counts as the lowest. A softmax of a NaN gives weights of NaN.
    """
    num_experts = routing.num_experts
    if (
        logits.shape[1:] != (num_experts,)
        or logits.dtype is not torch.float32
        or not logits.is_contiguous()
        or (bias is not None and (routing.scoring == "sparsemixer" or not _is_row(bias, num_experts, logits)))
    ):
        takes = (
            f"contiguous float32 logits [num_tokens, {num_experts}] and a bias [{num_experts}] or None, which "
            "sparsemixer has not"
        )
        raise refusal("route", takes, logits=logits, bias=bias, routing=routing)
    return backend_of(logits).route(logits, routing, bias)


def group_by_expert(ids: Tensor, num_experts: int) -> ExpertRows:
    """The tokens' experts `ids` [num_tokens, top_k] int32, contiguous and below `num_experts`, grouped."""
    is_number = is_count(num_experts, 1) and num_experts <= MAX_EXPERTS
    if ids.dtype is not torch.int32 or ids.dim() != 2 or ids.shape[1] == 0 or not ids.is_contiguous() or not is_number:
        takes = f"contiguous ids [num_tokens, top_k] int32, and 1 to {MAX_EXPERTS} experts"
        raise refusal("group_by_expert", takes, ids=ids, num_experts=num_experts)
    with KERNEL_ERRORS:
        return backend_of(ids).group_by_expert(ids, num_experts)


def read_ahead(files: ExpertFiles, rows: ExpertRows) -> None:
    """Ask the system for the matrices of all experts that have rows, in whole, where they are not in memory.

    Does not wait for them. A product reads a matrix page by page, and the system then reads as much again around each.
    """
    if len(files.ranges) != len(rows.starts) - 1:
        raise refusal("read_ahead", f"rows grouped for {len(files.ranges)} experts", starts=rows.starts)
    backend_of(rows.starts).read_ahead(files, rows)


def expert_matmul(
    x: Tensor, experts: ExpertWeights, rows: ExpertRows, *, of_tokens: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Rows times the matrices of their experts, plus the biases, in the order of `rows`: [num_pairs, n], x's dtype.

    x is contiguous, of the matrices' dtype, and has a row of k for each token (`of_tokens`), or for each pair in the
    order of `rows`. Each row gets the bits that kernels.matmul gives it.
    """
    out_dtype = out_dtype or experts.dtype
    num_pairs = len(rows.pairs)
    if (
        x.shape != (num_pairs // rows.top_k if of_tokens else num_pairs, experts.k)
        or x.dtype is not experts.dtype
        or not x.is_contiguous()
        or rows.starts.shape != (experts.num_experts + 1,)
        or out_dtype not in DTYPES
        or {rows.pairs.device, experts.experts[0][0].data.device} != {x.device}
    ):
        takes = (
            f"contiguous x [{'tokens' if of_tokens else 'pairs'}, {experts.k}] {experts.dtype} for these "
            f"{experts.num_experts} experts, rows grouped for as many, all on one device, and out_dtype float32 or "
            "bfloat16"
        )
        raise refusal("expert_matmul", takes, x=x, pairs=rows.pairs, starts=rows.starts, out_dtype=out_dtype)
    backend = backend_of(x)
    with KERNEL_ERRORS:
        out = backend.empty((num_pairs, experts.n), out_dtype)
        backend.expert_matmul(x, experts, rows, of_tokens, out)
    return out


def combine_experts(
    y: Tensor, weights: Tensor, rows: ExpertRows, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Each token's sum of its experts' results times their weights, in the order of their ranks: [num_tokens, width].

    y [num_pairs, width] float32 or bfloat16 is in the order of `rows`, weights [num_tokens, top_k] float32. `shared`
    [num_tokens, width] is added, times the sigmoid of `gate` [num_tokens, 1] float32 if that is given. Sums are
    float32, rounded once. All are contiguous.
    """
    num_tokens = len(weights)
    if (
        y.dim() != 2
        or y.dtype not in DTYPES
        or weights.shape != (num_tokens, rows.top_k)
        or weights.dtype is not torch.float32
        or len(y) != len(rows.places)
        or len(y) != num_tokens * rows.top_k
        or not (shared is None or (shared.shape == (num_tokens, y.shape[1]) and shared.dtype is y.dtype))
        or not (gate is None or (shared is not None and gate.shape == (num_tokens, 1) and gate.dtype is torch.float32))
        or not all(each is None or each.is_contiguous() for each in (y, weights, shared, gate))
        or {each.device for each in (y, weights, rows.places, shared, gate) if each is not None} != {y.device}
    ):
        takes = (
            "contiguous y [num_pairs, width] float32 or bfloat16, weights [num_tokens, top_k] float32, shared "
            "[num_tokens, width] as y or None, and with it gate [num_tokens, 1] float32 or None, all on one device"
        )
        raise refusal("combine_experts", takes, y=y, weights=weights, shared=shared, gate=gate)
    return backend_of(y).combine_experts(y, weights, rows, shared, gate)


def _is_row(row: Tensor, length: int, beside: Tensor) -> bool:
    is_there = row.device == beside.device
    return row.shape == (length,) and row.dtype is torch.float32 and row.is_contiguous() and is_there
