"""The paged KV cache: its layout, writing and reading tokens, copying blocks and slots."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, KERNEL_ERRORS, are_ids, refusal


def make_layer_cache(
    buffer: Tensor, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """View a uint8 tensor, flat or a row of bytes for each block, as one layer's (k_cache, v_cache).

    v_cache is [num_blocks, num_kv_heads, block_size, head_dim]; the shape of k_cache is the layout of the backend. The
    buffer, or its rows, may be longer than the cache.
    """
    return backend_of(buffer).make_layer_cache(buffer, num_blocks, block_size, num_kv_heads, head_dim, dtype)


def make_latent_cache(buffer: Tensor, num_blocks: int, block_size: int, width: int, dtype: torch.dtype) -> Tensor:
    """View a buffer, as that of `make_layer_cache`, as the latents of one layer of multi-head latent attention:
    [num_blocks, block_size, width] float32 or bfloat16."""
    return backend_of(buffer).latent.make_cache(buffer, num_blocks, block_size, width, dtype)


def write_latents(latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store new latents [num_tokens, rank], and behind each its part of the keys that is rotated,
    [num_tokens, width - rank], in slots [num_tokens] int64. From token to token both have any stride."""
    backend = backend_of(cache)
    fits = (
        backend.latent.is_cache(cache)
        and all(backend.holds(x) and x.dtype is cache.dtype and x.dim() == 2 for x in (latents, rotary))
        and all(x.is_contiguous() or x.stride(1) == 1 for x in (latents, rotary))
        and latents.shape[1] + rotary.shape[1] == cache.shape[2]
        and len(latents) == len(rotary) == len(slots)
        and are_ids(backend.holds, slots)
    )
    if not fits:
        raise refusal("write_latents", _LATENTS_TAKE, latents=latents, rotary=rotary, cache=cache, slots=slots)
    with KERNEL_ERRORS:
        backend.latent.write(latents, rotary, cache, slots)


def copy_latent_slots(cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """As `copy_slots` of a cache of latents."""
    backend = backend_of(cache)
    fits = (
        backend.latent.is_cache(cache)
        and all(are_ids(backend.holds, slots) for slots in (src_slots, dst_slots))
        and src_slots.shape == dst_slots.shape
    )
    if not fits:
        takes = f"a cache as make_latent_cache makes it, {_SLOTS_TAKES}"
        raise refusal("copy_latent_slots", takes, cache=cache, src_slots=src_slots, dst_slots=dst_slots)
    with KERNEL_ERRORS:
        backend.latent.copy_slots(cache, src_slots, dst_slots)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store new keys and values in their slots, as reference.write_kv.

    key, value [num_tokens, num_kv_heads, head_dim], from token to token with any stride; slots [num_tokens] int64. An
    int8 cache takes float32 and bfloat16, each token and head with scales of its own.
    """
    backend = backend_of(v_cache)
    fits = (
        cache_is_valid(backend, k_cache, v_cache)
        and _tokens_match(backend, key, v_cache)
        and _tokens_match(backend, value, v_cache)
        and key.dtype is value.dtype
        and key.shape[0] == value.shape[0] == slots.shape[0]
        and are_ids(backend.holds, slots)
    )
    if not fits:
        given = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
        raise refusal("write_kv", f"{_WRITE_TAKES}, {backend.cache_layout}", **given)
    with KERNEL_ERRORS:
        backend.write_kv(key, value, k_cache, v_cache, slots)


def gather_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `write_kv`: keys and values [num_tokens, num_kv_heads, head_dim] of slots [num_tokens] int64.

    Those of an int8 cache are float32, and only nearly what was written.
    """
    backend = backend_of(v_cache)
    if not (cache_is_valid(backend, k_cache, v_cache) and are_ids(backend.holds, slots)):
        takes = f"{_SLOTS_TAKES}, {backend.cache_layout}"
        raise refusal("gather_kv", takes, k_cache=k_cache, v_cache=v_cache, slots=slots)
    with KERNEL_ERRORS:
        return backend.gather_kv(k_cache, v_cache, slots)


def copy_slots(k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy single tokens' keys and values from slots to slots [num_tokens] int64, as reference.copy_slots.

    No slot may be both read and written in one call.
    """
    backend = backend_of(v_cache)
    fits = (
        cache_is_valid(backend, k_cache, v_cache)
        and all(are_ids(backend.holds, slots) for slots in (src_slots, dst_slots))
        and src_slots.shape == dst_slots.shape
    )
    if not fits:
        given = {"k_cache": k_cache, "v_cache": v_cache, "src_slots": src_slots, "dst_slots": dst_slots}
        raise refusal("copy_slots", f"{_SLOTS_TAKES}, {backend.cache_layout}", **given)
    with KERNEL_ERRORS:
        backend.copy_slots(k_cache, v_cache, src_slots, dst_slots)


def copy_blocks(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """`dst[d] = src[s]` for each (s, d) of pairs [num_pairs, 2] int64; src, dst [num_blocks, block_bytes] uint8.

    src and dst may be the same pool. No block may be both read and written, or written twice, in one call.
    """
    backend = backend_of(src)
    fits = (
        all(pool.dtype is torch.uint8 and pool.dim() == 2 and pool.is_contiguous() for pool in (src, dst))
        and backend.holds(dst)
        and src.shape[1] == dst.shape[1]
        and are_ids(backend.holds, pairs, 2)
        and pairs.shape[1] == 2
    )
    if not fits:
        raise refusal("copy_blocks", _COPY_TAKES, src=src, dst=dst, pairs=pairs)
    with KERNEL_ERRORS:
        backend.copy_blocks(src, dst, pairs)


def cache_is_valid(backend: Backend, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether these are a layer's caches as `make_layer_cache` makes them, or separate ones of the same shape."""
    return backend.holds(k_cache) and backend.holds(v_cache) and backend.is_layer_cache(k_cache, v_cache)


def _tokens_match(backend: Backend, tokens: Tensor, v_cache: Tensor) -> bool:
    shape, (_, num_kv_heads, _, head_dim) = tokens.shape, v_cache.shape
    return (
        backend.holds(tokens)
        and (tokens.dtype in DTYPES if v_cache.dtype is torch.int8 else tokens.dtype is v_cache.dtype)
        and len(shape) == 3
        and shape[1:] == (num_kv_heads, head_dim)
        and (tokens.is_contiguous() or tokens.stride()[1:] == (head_dim, 1))
    )


_WRITE_TAKES = (
    "key and value [num_tokens, num_kv_heads, head_dim] of the cache's dtype (or, into int8, both float32 or both "
    "bfloat16) with each token's heads contiguous, contiguous int64 slots [num_tokens], all on one device"
)
_LATENTS_TAKE = (
    "latents [num_tokens, rank] and rotary [num_tokens, width - rank] of the cache's dtype with stride 1 in the last "
    "dimension, a cache [num_blocks, block_size, width] as make_latent_cache makes it, and contiguous int64 slots "
    "[num_tokens], all on one device"
)
_SLOTS_TAKES = "contiguous int64 slots [num_tokens], all on one device"
_COPY_TAKES = (
    "contiguous uint8 pools [num_blocks, block_bytes] of equal block_bytes and contiguous int64 pairs [num_pairs, 2] "
    "of source and destination block, on one device"
)
