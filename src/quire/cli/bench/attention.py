"""Benchmark of attention over paged keys and values.

Decode attention is limited by reading keys and values, prefill attention by multiply-adds.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from quire import kernels
from quire.cli.bench.limits import COLD_BYTES, compare
from quire.common.progress import tracked
from quire.config.kv_cache import FullAttentionSpec, LatentSpec

_HEADS = ((14, 2, 64), (32, 8, 128), (12, 12, 64))
"""Each entry is (num_heads, num_kv_heads, head_dim)."""
_LATENT_HEADS, _RANK, _ROTARY_DIM = 16, 512, 64  # of DeepSeek-V2-Lite
_VARIANTS = {
    "softcap": lambda num_heads: kernels.AttentionVariant(softcap=50.0),
    "sinks": lambda num_heads: kernels.AttentionVariant(sinks=torch.zeros(num_heads)),
    "slopes": lambda num_heads: kernels.AttentionVariant(slopes=torch.full((num_heads,), 0.01)),
}
_LONGEST_PREFILL, _LARGEST_CACHE = 2048, 2**30


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape, context, batch and block size, except caches over 1 GiB and prompts over 2,048
    tokens. Rows named after a variant decode one sequence of the first shape.

    In a `shared` row the sequences decode after one common prefix: all of their blocks but the last are shared, and the
    bytes of shared blocks are counted once.
    """
    kernels.set_num_threads(options.threads or kernels.num_threads())
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    cases = [("decode", *case) for case in product(_HEADS, options.num_seqs, options.context)]
    cases += [("shared", *case) for case in product(_HEADS, options.num_seqs, options.context) if case[1] > 1]
    cases += [("prefill", heads, 1, context) for heads, context in product(_HEADS, options.context)]
    cases += [(variant, _HEADS[0], 1, context) for variant, context in product(_VARIANTS, options.context)]
    yield from _latents(options)
    measured = [*product(cases, (options.dtype, "int8"), options.block_size)]
    for (kind, heads, num_seqs, context), cache, block_size in tracked(measured, "attention"):
        query_len = context if kind == "prefill" else 1
        spec = FullAttentionSpec(heads[1], heads[2], cache)
        num_own = (context - 1) % block_size + 1 if kind == "shared" else context
        num_bytes = spec.bytes_per_token * (context - num_own + num_own * num_seqs)
        if num_bytes <= _LARGEST_CACHE and query_len <= _LONGEST_PREFILL:
            flops = 4 * heads[0] * heads[2] * num_seqs * query_len * (context - (query_len - 1) / 2)
            row = compare(
                _calls(heads[0], spec, block_size, context, query_len, num_seqs, dtype, kind),
                num_bytes,
                flops,
                options.dtype,
                options.seconds,
            )
            sizes = {"block_size": block_size, "context": context, "num_seqs": num_seqs}
            yield {"attention": kind, "heads": heads, "cache": cache} | sizes | row


def _calls(
    num_heads: int,
    spec: FullAttentionSpec,
    block_size: int,
    context: int,
    query_len: int,
    num_seqs: int,
    dtype: torch.dtype,
    kind: str,
) -> list[Callable[[], object]]:
    """Return calls that attend to equal sequences in shuffled blocks; together they exceed every CPU cache."""
    num_kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    blocks_per_call = -(-context // block_size) * num_seqs
    buffer, num_blocks = _cold_buffer(block_size * spec.bytes_per_token, blocks_per_call)
    cache_dtype = getattr(torch, spec.dtype)
    k_cache, v_cache = kernels.make_layer_cache(buffer, num_blocks, block_size, num_kv_heads, head_dim, cache_dtype)
    for slots in torch.arange(num_blocks * block_size).tensor_split(-(-num_blocks // 256)):  # touches every page
        key, value = torch.randn(2, len(slots), num_kv_heads, head_dim).to(dtype)
        kernels.write_kv(key, value, k_cache, v_cache, slots)
    query = torch.randn(query_len * num_seqs, num_heads, head_dim).to(dtype)
    query_start = torch.arange(0, query_len * num_seqs + 1, query_len, dtype=torch.int32)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    attend = partial(kernels.paged_attention, query, k_cache, v_cache, query_start, seq_lens)
    tables = torch.randperm(num_blocks).int().view(-1, num_seqs, blocks_per_call // num_seqs)
    if kind == "shared":
        tables[:, :, :-1] = tables[:, :1, :-1]
    variant = _VARIANTS[kind](num_heads) if kind in _VARIANTS else kernels.AttentionVariant()
    return [partial(attend, table, head_dim**-0.5, variant) for table in tables]


def _latents(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row of latent attention for each context and batch."""
    spec = LatentSpec(_RANK, _ROTARY_DIM, options.dtype)
    heads = _LATENT_HEADS, 1, spec.width
    measured = [*product(options.num_seqs, options.context, options.block_size)]
    for num_seqs, context, block_size in tracked(measured, "latent attention"):
        num_bytes = spec.bytes_per_token * context * num_seqs
        if num_bytes <= _LARGEST_CACHE:
            flops = 2 * _LATENT_HEADS * (spec.width + spec.rank) * num_seqs * context
            calls = _latent_calls(spec, block_size, context, num_seqs)
            row = compare(calls, num_bytes, flops, options.dtype, options.seconds)
            sizes = {"block_size": block_size, "context": context, "num_seqs": num_seqs}
            yield {"attention": "latent", "heads": heads, "cache": options.dtype} | sizes | row


def _latent_calls(spec: LatentSpec, block_size: int, context: int, num_seqs: int) -> list[Callable[[], object]]:
    """As `_calls`, of sequences that decode over latents."""
    blocks_per_call, dtype = -(-context // block_size) * num_seqs, getattr(torch, spec.dtype)
    buffer, num_blocks = _cold_buffer(block_size * spec.bytes_per_token, blocks_per_call)
    cache = kernels.make_latent_cache(buffer, num_blocks, block_size, spec.width, dtype)
    for slots in torch.arange(num_blocks * block_size).tensor_split(-(-num_blocks // 256)):  # touches every page
        rows = torch.randn(len(slots), spec.width).to(dtype)
        kernels.write_latents(rows[:, : spec.rank], rows[:, spec.rank :], cache, slots)
    query = torch.randn(num_seqs, _LATENT_HEADS, spec.width).to(dtype)
    query_start = torch.arange(num_seqs + 1, dtype=torch.int32)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    attend = partial(kernels.latent_attention, query, cache, query_start, seq_lens)
    tables = torch.randperm(num_blocks).int().view(-1, num_seqs, blocks_per_call // num_seqs)
    return [partial(attend, table, spec.rank, spec.width**-0.5) for table in tables]


def _cold_buffer(block_bytes: int, blocks_per_call: int) -> tuple[torch.Tensor, int]:
    """Memory of blocks for calls that together exceed every CPU cache, and the number of blocks."""
    num_blocks = max(1, COLD_BYTES // (block_bytes * blocks_per_call)) * blocks_per_call
    memory = np.zeros(num_blocks * block_bytes + 64, np.uint8)  # NumPy asks for huge pages, as the engine does
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + num_blocks * block_bytes]), num_blocks
