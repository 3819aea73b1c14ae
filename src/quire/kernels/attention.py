"""Causal attention over the paged KV cache, for decode, chunks and whole prompts in one call."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, kernel_errors, refusal
from quire.kernels.kv_cache import cache_is_valid
from quire.kernels.variants import PLAIN, AttentionVariant


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> Tensor:
    """Attention of a mixed batch, as backends/reference_attention.py defines it -> [num_tokens, num_heads, head_dim].

    query [num_tokens, num_heads, head_dim], from token to token with any stride; query_start [num_seqs + 1], seq_lens
    [num_seqs] and block_tables [num_seqs, max_blocks] int32. Table entries of blocks wholly before the first key that a
    sequence's window or chunk still shows may hold anything. Keys and values in the cache must be finite. Over an int8
    cache the query is float32 or bfloat16; it and the probabilities are rounded to int16 multiples of their largest.

    With the native kernels each row has the same bits whatever else is in the batch, however the prompt is cut into
    chunks, whatever the block size, the placement of the blocks and the number of threads.
    """
    backend = backend_of(v_cache)
    fits = (
        cache_is_valid(backend, k_cache, v_cache)
        and backend.holds(query)
        and _query_matches(query, v_cache)
        and _tables_match(backend, query_start, seq_lens, block_tables)
        and all(_is_of_heads(backend, each, query.shape[1]) for each in (variant.sinks, variant.slopes))
    )
    if not fits:
        given = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "query_start": query_start}
        given |= {"seq_lens": seq_lens, "block_tables": block_tables}
        numbers = {"sinks": variant.sinks, "slopes": variant.slopes}
        raise refusal("paged_attention", f"{_TAKES}, {backend.cache_layout}", **given, **numbers)
    with kernel_errors():
        return backend.paged_attention(query, k_cache, v_cache, query_start, seq_lens, block_tables, scale, variant)


def latent_attention(
    query: Tensor,
    cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    value_dim: int,
    scale: float,
) -> Tensor:
    """Attention over latents, as backends/reference_attention.py defines it -> [num_tokens, num_heads, value_dim].

    query [num_tokens, num_heads, width], contiguous; cache as make_latent_cache makes it. All else, and what is
    promised of the bits, is as for paged_attention.
    """
    backend = backend_of(cache)
    fits = (
        backend.latent.is_cache(cache)
        and backend.holds(query)
        and query.dtype is cache.dtype
        and query.dim() == 3
        and query.shape[1] > 0
        and query.shape[2] == cache.shape[2]
        and query.is_contiguous()
        and 0 < value_dim <= cache.shape[2]
        and _tables_match(backend, query_start, seq_lens, block_tables)
    )
    if not fits:
        given = {"query": query, "cache": cache, "query_start": query_start, "seq_lens": seq_lens}
        raise refusal("latent_attention", _LATENT_TAKES, **given, block_tables=block_tables, value_dim=value_dim)
    with kernel_errors():
        return backend.latent.attention(query, cache, query_start, seq_lens, block_tables, value_dim, scale)


def _query_matches(query: Tensor, v_cache: Tensor) -> bool:
    shape, (_, num_kv_heads, _, head_dim) = query.shape, v_cache.shape
    return (
        (query.dtype in DTYPES if v_cache.dtype is torch.int8 else query.dtype is v_cache.dtype)
        and len(shape) == 3
        and shape[1] > 0
        and shape[1] % num_kv_heads == 0
        and shape[2] == head_dim
        and (query.is_contiguous() or query.stride()[1:] == (head_dim, 1))
    )


def _is_of_heads(backend: Backend, numbers: Tensor | None, num_heads: int) -> bool:
    """Whether these sinks or slopes are none, or one float32 for each query head."""
    return numbers is None or (
        numbers.dtype is torch.float32
        and numbers.shape == (num_heads,)
        and numbers.is_contiguous()
        and backend.holds(numbers)
    )


def _tables_match(backend: Backend, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor) -> bool:
    holds, lens, tables = backend.holds, seq_lens.shape, block_tables.shape
    return (
        holds(query_start)
        and holds(seq_lens)
        and holds(block_tables)
        and query_start.dtype is seq_lens.dtype is block_tables.dtype is torch.int32
        and len(lens) == 1
        and len(tables) == 2
        and query_start.shape == (lens[0] + 1,)
        and tables[0] == lens[0]
        and query_start.is_contiguous()
        and seq_lens.is_contiguous()
        and (block_tables.is_contiguous() or block_tables.stride(1) == 1)
    )


_LATENT_TAKES = (
    "contiguous query [num_tokens, num_heads, width] and cache [num_blocks, block_size, width] as make_latent_cache "
    "makes it, of the same dtype, int32 query_start [num_seqs + 1], seq_lens [num_seqs] and block_tables "
    "[num_seqs, max_blocks], all on one device, and a value_dim up to width"
)
_TAKES = (
    "query [num_tokens, num_heads, head_dim] with each token's heads contiguous and num_heads a multiple of "
    "num_kv_heads, k_cache and v_cache as make_layer_cache makes them, of the same dtype or int8, int32 query_start "
    "[num_seqs + 1], seq_lens [num_seqs] and block_tables [num_seqs, max_blocks], contiguous float32 sinks and "
    "slopes [num_heads] or None, all on one device"
)
