"""Attention over paged keys and values: decoding is limited by reading them, prefill by multiply-adds."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from quire import kernels
from quire.cli.bench.limits import COLD_BYTES, compare

_HEADS = ((14, 2, 64), (32, 8, 128))
"""num_heads, num_kv_heads, head_dim"""
_BLOCK_SIZE, _LONGEST_PREFILL, _LARGEST_CACHE = 16, 2048, 2**30


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each shape, context and batch; caches over 1 GiB and prompts over 2,048 tokens are left out."""
    kernels.set_num_threads(options.threads or kernels.num_threads())
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    cases = [("decode", *case) for case in product(_HEADS, options.num_seqs, options.context)]
    cases += [("prefill", heads, 1, context) for heads, context in product(_HEADS, options.context)]
    for kind, heads, num_seqs, context in cases:
        query_len = 1 if kind == "decode" else context
        num_bytes = 2 * heads[1] * heads[2] * dtype.itemsize * context * num_seqs
        if num_bytes <= _LARGEST_CACHE and query_len <= _LONGEST_PREFILL:
            flops = 4 * heads[0] * heads[2] * num_seqs * query_len * (context - (query_len - 1) / 2)
            row = compare(
                _calls(heads, context, query_len, num_seqs, dtype), num_bytes, flops, options.dtype, options.seconds
            )
            yield {"attention": kind, "heads": heads, "context": context, "num_seqs": num_seqs} | row


def _calls(
    heads: tuple[int, int, int], context: int, query_len: int, num_seqs: int, dtype: torch.dtype
) -> list[Callable[[], object]]:
    """Calls for equal sequences in shuffled blocks of their own, so many that no cache holds them."""
    num_heads, num_kv_heads, head_dim = heads
    block_bytes = 2 * num_kv_heads * _BLOCK_SIZE * head_dim * dtype.itemsize
    blocks_per_call = -(-context // _BLOCK_SIZE) * num_seqs
    num_blocks = max(1, COLD_BYTES // (block_bytes * blocks_per_call)) * blocks_per_call
    buffer = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8)
    k_cache, v_cache = kernels.make_layer_cache(buffer, num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim, dtype)
    k_cache.fill_(0.5)  # takes the pages
    v_cache.fill_(0.5)
    query = torch.randn(query_len * num_seqs, num_heads, head_dim).to(dtype)
    query_start = torch.arange(0, query_len * num_seqs + 1, query_len, dtype=torch.int32)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    attend = partial(kernels.paged_attention, query, k_cache, v_cache, query_start, seq_lens)
    tables = torch.randperm(num_blocks).int().view(-1, num_seqs, blocks_per_call // num_seqs)
    return [partial(attend, table, head_dim**-0.5) for table in tables]
