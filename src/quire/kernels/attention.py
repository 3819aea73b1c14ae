"""Causal attention over the paged KV cache, for decode, chunks and whole prompts in one call."""

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import native_errors, refusal
from quire.kernels.kv_cache import cache_is_valid
from quire.kernels.workspace import empty

_SEES_ALL = 2**63 - 1


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of a mixed batch, as reference.paged_attention -> [num_tokens, num_heads, head_dim], contiguous.

    query [num_tokens, num_heads, head_dim], from token to token with any stride; query_start [num_seqs + 1], seq_lens
    [num_seqs] and block_tables [num_seqs, max_blocks] int32. Table entries of blocks wholly before the first key that a
    sequence's window still shows may hold anything. Keys and values in the cache must be finite. Over an int8 cache the
    query is float32 or bfloat16; it and the probabilities are rounded to int16 multiples of their largest.

    Each row has the same bits whatever else is in the batch, however the prompt is cut into chunks, whatever the block
    size, the placement of the blocks and the number of threads.
    """
    taken = (
        cache_is_valid(k_cache, v_cache)
        and _query_matches(query, v_cache)
        and _tables_match(query_start, seq_lens, block_tables)
        and (sliding_window is None or sliding_window >= 1)
    )
    if not taken:
        given = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "query_start": query_start}
        given |= {"seq_lens": seq_lens, "block_tables": block_tables}
        raise refusal("paged_attention", _TAKES, **given, sliding_window=sliding_window)
    if native is None:
        _check_ranges(query, v_cache, query_start, seq_lens, block_tables, sliding_window)
        return reference.paged_attention(
            query, k_cache, v_cache, query_start, seq_lens, block_tables, scale, sliding_window
        )
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = v_cache.shape
    out = empty((num_tokens, num_heads, head_dim), query.dtype)
    with native_errors():
        native.paged_attention(
            DTYPE_CODES[query.dtype],
            query.data_ptr(),
            query.stride(0),
            v_cache.dtype is torch.int8,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
            v_cache.stride(0),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0),
            block_tables.shape[1],
            num_tokens,
            len(seq_lens),
            num_heads,
            num_kv_heads,
            head_dim,
            num_blocks,
            block_size,
            _SEES_ALL if sliding_window is None else sliding_window,
            scale,
            out.data_ptr(),
        )
    return out


def _query_matches(query: Tensor, v_cache: Tensor) -> bool:
    num_kv_heads, head_dim = v_cache.shape[1], v_cache.shape[3]
    return (
        query.is_cpu
        and (query.dtype in DTYPE_CODES if v_cache.dtype is torch.int8 else query.dtype is v_cache.dtype)
        and query.dim() == 3
        and query.shape[1] > 0
        and query.shape[1] % num_kv_heads == 0
        and query.shape[2] == head_dim
        and (query.stride()[1:] == (head_dim, 1) or query.is_contiguous())
    )


def _tables_match(query_start: Tensor, seq_lens: Tensor, block_tables: Tensor) -> bool:
    return (
        all(t.is_cpu and t.dtype is torch.int32 for t in (query_start, seq_lens, block_tables))
        and seq_lens.dim() == 1
        and block_tables.dim() == 2
        and query_start.shape == (len(seq_lens) + 1,)
        and len(block_tables) == len(seq_lens)
        and query_start.is_contiguous()
        and seq_lens.is_contiguous()
        and (block_tables.is_contiguous() or block_tables.stride(1) == 1)
    )


def _check_ranges(
    query: Tensor, v_cache: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor, window: int | None
) -> None:
    """What the native kernel checks itself, for the reference."""
    num_blocks, _, block_size, _ = v_cache.shape
    starts = query_start.tolist()
    if starts[0] != 0 or starts[-1] != len(query) or starts != sorted(starts):
        raise KernelError(f"paged_attention: query_start must rise from 0 to {len(query)}, it is {starts}")
    for s, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[s + 1] - starts[s]
        blocks = -(-seq_len // block_size)
        if query_len > seq_len or (query_len and blocks > block_tables.shape[1]):
            raise KernelError(
                f"paged_attention, sequence {s}: {query_len} query tokens of {seq_len} in all do not fit a block table "
                f"of {block_tables.shape[1]} blocks of {block_size}"
            )
        first_key = 0 if window is None else max(0, seq_len - query_len - window + 1)
        used = block_tables[s, first_key // block_size : blocks] if query_len else block_tables[s, :0]
        for block in used[(used < 0) | (used >= num_blocks)][:1].tolist():
            raise KernelError(f"paged_attention, sequence {s}: block id {block} is not in [0, {num_blocks})")


_TAKES = (
    "query [num_tokens, num_heads, head_dim] with each token's heads contiguous and num_heads a multiple of "
    "num_kv_heads, k_cache and v_cache as make_layer_cache makes them, of the same dtype or int8, int32 query_start "
    "[num_seqs + 1], seq_lens [num_seqs] and block_tables [num_seqs, max_blocks], a sliding_window of at least 1 or "
    "None, on the CPU"
)
