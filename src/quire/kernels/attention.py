"""Attention: causal over the paged KV cache, for decode, chunks and whole prompts in one call, or of whole texts."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, KERNEL_ERRORS, are_numbers, is_whole, refusal
from quire.kernels.kv_cache import cache_is_valid
from quire.kernels.variants import PLAIN, UNMASKED, AttentionVariant, DistanceTerms, EncoderVariant


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
        and are_numbers(backend.holds, query.shape[1:2], variant.sinks, variant.slopes)
    )
    if not fits:
        given = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "query_start": query_start}
        given |= {"seq_lens": seq_lens, "block_tables": block_tables}
        numbers = {"sinks": variant.sinks, "slopes": variant.slopes}
        raise refusal("paged_attention", f"{_TAKES}, {backend.cache_layout}", **given, **numbers)
    with KERNEL_ERRORS:
        return backend.paged_attention(query, k_cache, v_cache, (query_start, seq_lens, block_tables), scale, variant)


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
    with KERNEL_ERRORS:
        return backend.latent.attention(query, cache, (query_start, seq_lens, block_tables), value_dim, scale)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    variant: EncoderVariant = UNMASKED,
    terms: DistanceTerms | None = None,
) -> Tensor:
    """Attention of whole sequences, as backends/reference_attention.py defines it -> as query, in new memory.

    query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], from token to token
    with any stride; query_start [num_seqs + 1] and seq_lens [num_seqs] int32, of which the first says where sequences
    begin, and the second repeats how long they are.

    With the native kernels each row has the same bits whatever other sequences are in the batch.
    """
    backend = backend_of(query)
    heads = key.shape[1] if len(key.shape) == 3 else 0
    fits = (
        query.dtype in DTYPES
        and heads > 0
        and all(_are_heads(backend, x, query) for x in (query, key, value))
        and key.shape == value.shape
        and query.shape[1] % heads == 0
        and (query.shape[2] * query.dtype.itemsize) % 4 == 0
        and _lens_match(backend, query_start, seq_lens)
        and are_numbers(backend.holds, query.shape[1:2], variant.slopes)
        and (variant.bias is None or _is_bias(backend, variant.bias, query.shape[1]))
        and (terms is None or _are_terms(backend, terms, query))
    )
    if not fits:
        given: dict[str, object] = {"query": query, "key": key, "value": value, "query_start": query_start}
        given |= {"seq_lens": seq_lens, "slopes": variant.slopes, "bias": variant.bias, "terms": terms}
        raise refusal("encoder_attention", _ENCODER_TAKES, **given)
    with KERNEL_ERRORS:
        return backend.encoder.attention(query, key, value, query_start, seq_lens, scale, variant, terms)


def _are_heads(backend: Backend, x: Tensor, query: Tensor) -> bool:
    """Whether x has heads, and those of each token lie together: as many tokens as the query has, and of its width."""
    shape, like = x.shape, query.shape
    return (
        len(shape) == 3
        and len(like) == 3
        and min(shape[1:]) > 0
        and x.dtype is query.dtype
        and (shape[0], shape[2]) == (like[0], like[2])
        and (x.is_contiguous() or x.stride()[1:] == (shape[2], 1))
        and backend.holds(x)
    )


def _is_bias(backend: Backend, bias: Tensor, num_heads: int) -> bool:
    width = bias.shape[-1] if bias.shape else 0
    return width >= 16 and width % 2 == 0 and are_numbers(backend.holds, (num_heads, width), bias)


def _are_terms(backend: Backend, terms: DistanceTerms, query: Tensor) -> bool:
    tables = [table for table in (terms.of_query, terms.of_key) if table is not None]
    if not tables or tables[0].dim() != 3:
        return False
    shape, num_distances = (*query.shape[:2], tables[0].shape[2]), terms.term.numel()
    are_whole = are_numbers(backend.holds, shape, *tables)
    return are_whole and num_distances % 2 == 1 and is_whole(terms.term, (num_distances,), torch.int32, backend.holds)


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


def _lens_match(backend: Backend, query_start: Tensor, seq_lens: Tensor) -> bool:
    num_seqs = seq_lens.numel()
    is_whole_lens = is_whole(seq_lens, (num_seqs,), torch.int32, backend.holds)
    return is_whole_lens and is_whole(query_start, (num_seqs + 1,), torch.int32, backend.holds)


def _tables_match(backend: Backend, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor) -> bool:
    tables = block_tables.shape
    return (
        _lens_match(backend, query_start, seq_lens)
        and backend.holds(block_tables)
        and block_tables.dtype is torch.int32
        and len(tables) == 2
        and tables[0] == seq_lens.shape[0]
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
_ENCODER_TAKES = (
    "query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] float32 or bfloat16 "
    "with each token's heads contiguous, num_heads a multiple of num_kv_heads, none of them 0, and heads of whole four "
    "bytes, int32 query_start [num_seqs + 1] and seq_lens [num_seqs], contiguous float32 slopes [num_heads] and bias "
    "[num_heads, 2 * reach + 16] or None, terms of float32 [num_tokens, num_heads, num_terms] and int32 "
    "[2 * reach + 1] or None, all on one device"
)
