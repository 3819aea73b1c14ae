"""Benchmark of every kernel except attention.

A matrix product of few rows is limited by reading the weights, one of many rows by the multiply-adds. All other kernels
move bytes, and each byte read or written is counted once.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from quire import kernels
from quire.cli.bench.limits import COLD_BYTES, compare
from quire.common.progress import tracked

_SHAPES = ((4864, 896), (896, 4864), (4096, 4096), (151936, 896))  # n, k
_WIDTH, _VOCAB = 4096, 151936
_RANK, _SLOTS = 16, 8
_EXPERT_SHAPE, _EXPERTS, _TOP_K = (1536, 2048), 32, 4  # n, k
_HEAD_SHAPE = (16, 512, 128)  # heads, n, k
_DRAWS = ((0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 50, 1.0), (0.8, 0, 0.95))  # temperature, top_k, top_p


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and size."""
    kernels.set_num_threads(options.threads or kernels.num_threads())
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    matrices = [*product(_SHAPES, (options.dtype, *kernels.QUANTIZED_FORMATS))]
    for (n, k), weights in tracked(matrices, "matrix products"):
        weight = torch.randn(n, k).to(dtype)
        plain = weights == options.dtype
        size = weight.nbytes if plain else kernels.quantized_bytes(n, k, weights)
        copies = [  # too many to stay in a CPU cache
            kernels.pack_weight(weight) if plain else kernels.quantize_weight(weight, weights)
            for _ in range(1 + COLD_BYTES // size)
        ]
        for rows in options.rows:
            products = [partial(kernels.matmul, torch.randn(rows, k).to(dtype), copy) for copy in copies]
            row = compare(products, size, 2 * rows * n * k, weights, options.seconds)
            yield {"kernel": "matmul", "rows": rows, "n": n, "k": k} | row
    for (n, k), rows in tracked([*product(_SHAPES[:3], options.rows)], "adapters"):
        yield {"kernel": "add_lora", "rows": rows, "n": n, "k": k, "rank": _RANK} | _adapters(rows, n, k, options)
    for rows in tracked(options.rows, "experts"):
        n, k = _EXPERT_SHAPE
        sizes = {"rows": rows, "n": n, "k": k, "experts": _EXPERTS, "top_k": _TOP_K}
        yield {"kernel": "expert_matmul"} | sizes | _experts(rows, options)
    for rows in tracked(options.rows, "products by head"):
        num_heads, n, k = _HEAD_SHAPE
        yield {"kernel": "multiply_heads", "rows": rows, "heads": num_heads, "n": n, "k": k} | _heads(rows, options)
    for rows in tracked(options.rows, "other kernels"):
        for name, num_bytes, call in (*_row_kernels(rows, dtype), *_draws(min(rows, 64))):
            yield {"kernel": name, "rows": rows} | compare([call], num_bytes, 0, options.dtype, options.seconds)
    for block_bytes in (32 * 1024, 1024 * 1024):
        pool = torch.ones(COLD_BYTES // block_bytes, block_bytes, dtype=torch.uint8)
        copy = partial(kernels.copy_blocks, pool, pool, torch.randperm(len(pool)).view(-1, 2))
        row = compare([copy], pool.nbytes, 0, options.dtype, options.seconds)
        yield {"kernel": "copy_blocks", "block_bytes": block_bytes} | row


def _adapters(rows: int, n: int, k: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure up to eight adapters of rank _RANK, which take turns among the rows."""
    dtype = getattr(torch, options.dtype)
    distinct, num_bytes = min(rows, _SLOTS), _RANK * (n + k) * dtype.itemsize
    calls = []
    for _ in range(1 + COLD_BYTES // (_SLOTS * num_bytes)):
        table = kernels.LoRATable((n,), k, dtype, _SLOTS, _RANK)
        for slot in range(_SLOTS):
            factors = torch.randn(_RANK, k), torch.randn(n, _RANK)
            table.put(slot, kernels.pack_lora([factors], (n,), k, dtype))
        x, out = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
        calls.append(partial(kernels.add_lora, x, out, table, torch.arange(rows) % _SLOTS))
    moved = distinct * num_bytes + 2 * rows * n * dtype.itemsize
    return compare(calls, moved, 2 * rows * _RANK * (n + k), options.dtype, options.seconds)


def _experts(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure products with the experts of rows that are routed at random. Only the experts that have rows are read."""
    n, k = _EXPERT_SHAPE
    weight, x = (torch.randn(s).to(getattr(torch, options.dtype)) for s in (_EXPERT_SHAPE, (rows, k)))
    ids, _ = kernels.route(torch.randn(rows, _EXPERTS), kernels.Routing(_TOP_K, _EXPERTS))
    grouped, num_read = kernels.group_by_expert(ids, _EXPERTS), len(set(ids.flatten().tolist()))
    calls = [
        partial(kernels.expert_matmul, x, kernels.ExpertWeights(copies), grouped, of_tokens=True)
        for copies in ([kernels.pack_weight(weight) for _ in range(_EXPERTS)] for _ in range(2))
    ]
    return compare(calls, num_read * weight.nbytes, 2 * rows * _TOP_K * n * k, options.dtype, options.seconds)


def _heads(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the products of each head's rows and its own matrix."""
    num_heads, n, k = _HEAD_SHAPE
    weights, x = (torch.randn(s).to(getattr(torch, options.dtype)) for s in (_HEAD_SHAPE, (rows, num_heads, k)))
    copies = (kernels.pack_heads(weights) for _ in range(1 + COLD_BYTES // weights.nbytes))
    calls = [partial(kernels.multiply_heads, x, copy) for copy in copies]
    return compare(calls, weights.nbytes, 2 * rows * num_heads * n * k, options.dtype, options.seconds)


def _row_kernels(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield (name, bytes read and written, call) of each kernel that works on rows of activations."""
    x, residual = torch.randn(2, rows, _WIDTH).to(dtype)
    weight, bias = torch.ones(_WIDTH), torch.zeros(_WIDTH)
    heads, positions, cos_sin = x.view(rows, -1, 64), torch.arange(rows), torch.randn(rows, 64)
    yield "rms_norm", 2 * x.nbytes, partial(kernels.rms_norm, x, weight, 1e-6)
    yield "add_rms_norm", 4 * x.nbytes, partial(kernels.add_rms_norm, x, residual, weight, 1e-6)
    yield "layer_norm", 2 * x.nbytes, partial(kernels.layer_norm, x, weight, bias, 1e-6)
    yield "add_layer_norm", 4 * x.nbytes, partial(kernels.add_layer_norm, x, residual, weight, bias, 1e-6)
    yield "gelu", 2 * x.nbytes, partial(kernels.activation, x, "gelu")
    yield "gated silu", 1.5 * x.nbytes, partial(kernels.gated_activation, x, "silu")
    yield "gated swiglu with limits", 1.5 * x.nbytes, partial(kernels.gated_activation, x, kernels.ClampedSwiGLU())
    rotate = partial(kernels.rotary_embedding, heads, positions, cos_sin)
    ids, shares = kernels.route(torch.randn(rows, _EXPERTS), kernels.Routing(_TOP_K, _EXPERTS))
    y, grouped = torch.randn(rows * _TOP_K, _WIDTH).to(dtype), kernels.group_by_expert(ids, _EXPERTS)
    yield "combine_experts", y.nbytes + x.nbytes, partial(kernels.combine_experts, y, shares, grouped)
    yield "rotary_embedding", 2 * x.nbytes, rotate
    yield "interleaved rotary_embedding", 2 * x.nbytes, partial(rotate, interleaved=True)
    yield "scale", 2 * x.nbytes, partial(kernels.scale, x, 1.0)


def _draws(rows: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield (name, bytes read, call) of sampling and log-probabilities, with logits as peaked as a language model's."""
    logits, full = torch.randn(rows, _VOCAB) * 3, torch.ones(rows, dtype=torch.float64)
    for temperature, top_k, top_p in _DRAWS:
        cuts = ((full * top_k).long(), full * top_p, full * 0)
        how = kernels.SamplingTensors(full * temperature, *cuts, torch.rand(rows).double())
        name = f"sample temperature={temperature} top_k={top_k} top_p={top_p}"
        yield name, logits.nbytes, partial(kernels.sample, logits, how)
    yield "top_logprobs 5", logits.nbytes, partial(kernels.top_logprobs, logits, torch.zeros(rows).long(), 5)
    yield "softcap", 2 * logits.nbytes, partial(kernels.softcap, logits, 30.0)
