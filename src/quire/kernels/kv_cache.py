"""The paged KV cache: its layout, writing and reading tokens, copying blocks and slots."""

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import check_range, describe, native_errors, refusal

BLOCK_ALIGNMENT = 64
"""bytes: a cache line; the buffer of a layer starts on one"""

LANE_BYTES = 4
"""bytes of a key that lie together in the cache: one float32, two bfloat16 or four int8"""


def make_layer_cache(
    buffer: Tensor, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """View a uint8 tensor, flat or a row of bytes for each block, as one layer's (k_cache, v_cache).

    k_cache [num_blocks, num_kv_heads, head_dim / pack, block_size, pack] where pack elements fill LANE_BYTES, v_cache
    [num_blocks, num_kv_heads, block_size, head_dim]. An int8 k_cache is two longer in its third dimension: these lanes
    are the float32 scales of the key and of the value. A block's keys are followed by its values, so that a block is
    one run of bytes; those of other layers may lie between. The buffer, or its rows, may be longer.
    """
    if not _holds(dtype) or head_dim < 1 or head_dim * dtype.itemsize % LANE_BYTES:
        raise KernelError(
            "a KV cache holds float32, bfloat16 with an even head_dim, or int8 with a multiple of 4; "
            f"got {dtype} with head_dim {head_dim}"
        )
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads}
    if min(sizes.values()) < 1:
        raise KernelError(f"a KV cache needs positive sizes; got {sizes}")
    lanes, pack = _lanes(head_dim, dtype)
    key_bytes = block_size * num_kv_heads * lanes * LANE_BYTES  # of one block
    block_bytes = key_bytes + block_size * num_kv_heads * head_dim * dtype.itemsize
    is_flat = buffer.dim() == 1 and len(buffer) >= num_blocks * block_bytes
    is_rows = buffer.dim() == 2 and len(buffer) >= num_blocks and buffer.shape[1] >= block_bytes
    if buffer.dtype is not torch.uint8 or not (is_flat or is_rows) or buffer.stride(-1) != 1:
        raise KernelError(
            f"the buffer must be flat uint8 of at least {num_blocks * block_bytes} bytes, or {num_blocks} rows of "
            f"{block_bytes}; got {describe(buffer)}"
        )
    alignment = BLOCK_ALIGNMENT if is_flat else LANE_BYTES
    if buffer.data_ptr() % alignment or (is_rows and buffer.stride(0) % LANE_BYTES):
        raise KernelError(
            f"the buffer and its rows must start on a multiple of {alignment} bytes, got {buffer.data_ptr():#x}"
        )
    rows = buffer[: num_blocks * block_bytes].view(num_blocks, -1) if is_flat else buffer[:num_blocks, :block_bytes]
    blocks = rows.view(dtype)
    keys, values = blocks.tensor_split([key_bytes // dtype.itemsize], dim=1)
    return (
        keys.view(num_blocks, num_kv_heads, lanes, block_size, pack),
        values.view(num_blocks, num_kv_heads, block_size, head_dim),
    )


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store new keys and values in their slots, as reference.write_kv.

    key, value [num_tokens, num_kv_heads, head_dim], from token to token with any stride; slots [num_tokens] int64. An
    int8 cache takes float32 and bfloat16, each token and head with scales of its own.
    """
    taken = (
        cache_is_valid(k_cache, v_cache)
        and _tokens_match(key, v_cache)
        and _tokens_match(value, v_cache)
        and key.dtype is value.dtype
        and len(key) == len(value) == len(slots)
        and _ids_are_valid(slots, 1)
    )
    if not taken:
        raise refusal("write_kv", _WRITE_TAKES, key=key, value=value, k_cache=k_cache, v_cache=v_cache, slots=slots)
    if native is None:
        check_range("write_kv: slot", slots, _num_slots(v_cache))
        return reference.write_kv(key, value, k_cache, v_cache, slots)
    if v_cache.dtype is torch.int8:
        with native_errors():
            native.quantize_kv(
                _native_cache(k_cache, v_cache),
                DTYPE_CODES[key.dtype],
                key.data_ptr(),
                key.stride(0),
                value.data_ptr(),
                value.stride(0),
                slots.data_ptr(),
                len(slots),
            )
        return
    item = key.element_size()
    with native_errors():
        native.write_kv(
            _native_cache(k_cache, v_cache),
            key.data_ptr(),
            key.stride(0) * item,
            value.data_ptr(),
            value.stride(0) * item,
            slots.data_ptr(),
            len(slots),
        )


def gather_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `write_kv`: keys and values [num_tokens, num_kv_heads, head_dim] of slots [num_tokens] int64.

    Those of an int8 cache are float32, and only nearly what was written.
    """
    if not (cache_is_valid(k_cache, v_cache) and _ids_are_valid(slots, 1)):
        raise refusal("gather_kv", _GATHER_TAKES, k_cache=k_cache, v_cache=v_cache, slots=slots)
    if native is None or v_cache.dtype is torch.int8:
        check_range("gather_kv: slot", slots, _num_slots(v_cache))
        return reference.gather_kv(k_cache, v_cache, slots)
    _, num_kv_heads, _, head_dim = v_cache.shape
    key = torch.empty((len(slots), num_kv_heads, head_dim), dtype=v_cache.dtype)
    value = torch.empty_like(key)
    with native_errors():
        native.gather_kv(
            _native_cache(k_cache, v_cache), slots.data_ptr(), len(slots), key.data_ptr(), value.data_ptr()
        )
    return key, value


def copy_slots(k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy single tokens' keys and values from slots to slots [num_tokens] int64, as reference.copy_slots.

    No slot may be both read and written in one call.
    """
    taken = (
        cache_is_valid(k_cache, v_cache)
        and _ids_are_valid(src_slots, 1)
        and _ids_are_valid(dst_slots, 1)
        and len(src_slots) == len(dst_slots)
    )
    if not taken:
        raise refusal(
            "copy_slots", _GATHER_TAKES, k_cache=k_cache, v_cache=v_cache, src_slots=src_slots, dst_slots=dst_slots
        )
    if native is None:
        check_range("copy_slots: source slot", src_slots, _num_slots(v_cache))
        check_range("copy_slots: destination slot", dst_slots, _num_slots(v_cache))
        return reference.copy_slots(k_cache, v_cache, src_slots, dst_slots)
    with native_errors():
        native.copy_slots(_native_cache(k_cache, v_cache), src_slots.data_ptr(), dst_slots.data_ptr(), len(src_slots))


def copy_blocks(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """`dst[d] = src[s]` for each (s, d) of pairs [num_pairs, 2] int64; src, dst [num_blocks, block_bytes] uint8.

    src and dst may be the same pool. No block may be both read and written, or written twice, in one call.
    """
    taken = (
        all(
            pool.is_cpu and pool.dtype is torch.uint8 and pool.dim() == 2 and pool.is_contiguous()
            for pool in (src, dst)
        )
        and src.shape[1] == dst.shape[1]
        and _ids_are_valid(pairs, 2)
        and pairs.shape[1] == 2
    )
    if not taken:
        raise refusal("copy_blocks", _COPY_TAKES, src=src, dst=dst, pairs=pairs)
    if native is None:
        check_range("copy_blocks: source block", pairs[:, 0], len(src))
        check_range("copy_blocks: destination block", pairs[:, 1], len(dst))
        return reference.copy_blocks(src, dst, pairs)
    with native_errors():
        native.copy_blocks(
            src.data_ptr(), len(src), dst.data_ptr(), len(dst), src.shape[1], pairs.data_ptr(), len(pairs)
        )


def cache_is_valid(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether these are a layer's caches as `make_layer_cache` makes them, or separate ones of the same shape."""
    if v_cache.dim() != 4 or k_cache.dim() != 5 or not _holds(v_cache.dtype) or not len(v_cache):
        return False
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    lanes, pack = _lanes(head_dim, v_cache.dtype)
    return (
        k_cache.dtype is v_cache.dtype
        and k_cache.is_cpu
        and v_cache.is_cpu
        and head_dim % pack == 0
        and k_cache.shape == (num_blocks, num_kv_heads, lanes, block_size, pack)
        and _blocks_are_contiguous(k_cache, (lanes * block_size * pack, block_size * pack, pack, 1))
        and _blocks_are_contiguous(v_cache, (block_size * head_dim, head_dim, 1))
    )


def _holds(dtype: torch.dtype) -> bool:
    return dtype in DTYPE_CODES or dtype is torch.int8


def _lanes(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Lanes of one key, scales included, and the elements in each."""
    pack = LANE_BYTES // dtype.itemsize
    return head_dim // pack + (2 if dtype is torch.int8 else 0), pack


def _blocks_are_contiguous(cache: Tensor, strides: tuple[int, ...]) -> bool:
    return cache.stride()[1:] == strides or cache.select(0, 0).is_contiguous()  # sizes of 1 may have any stride


def _tokens_match(tokens: Tensor, v_cache: Tensor) -> bool:
    head_dim = v_cache.shape[3]
    return (
        tokens.is_cpu
        and (tokens.dtype in DTYPE_CODES if v_cache.dtype is torch.int8 else tokens.dtype is v_cache.dtype)
        and tokens.dim() == 3
        and tokens.shape[1:] == (v_cache.shape[1], head_dim)
        and (tokens.stride()[1:] == (head_dim, 1) or tokens.is_contiguous())
    )


def _ids_are_valid(ids: Tensor, dim: int) -> bool:
    return ids.is_cpu and ids.dtype is torch.int64 and ids.dim() == dim and ids.is_contiguous()


def _num_slots(v_cache: Tensor) -> int:
    return v_cache.shape[0] * v_cache.shape[2]


def _native_cache(k_cache: Tensor, v_cache: Tensor) -> object:
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    item = v_cache.element_size()
    return native.kv_cache(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0) * item,
        v_cache.stride(0) * item,
        num_blocks,
        num_kv_heads,
        k_cache.shape[2] * LANE_BYTES,
        head_dim * item,
        block_size,
    )


_CACHE_TAKES = (
    "k_cache [num_blocks, num_kv_heads, head_dim / pack, block_size, pack] and v_cache [num_blocks, num_kv_heads, "
    "block_size, head_dim], float32 (pack 1), bfloat16 (pack 2) or int8 (pack 4; two lanes more, the scales of key and "
    "value), each block contiguous, on the CPU"
)
_WRITE_TAKES = (
    "key and value [num_tokens, num_kv_heads, head_dim] of the cache's dtype (or, into int8, both float32 or both "
    "bfloat16) with each token's heads contiguous, "
    f"contiguous int64 slots [num_tokens], {_CACHE_TAKES}"
)
_GATHER_TAKES = f"contiguous int64 slots [num_tokens], {_CACHE_TAKES}"
_COPY_TAKES = (
    "contiguous uint8 pools [num_blocks, block_bytes] of equal block_bytes and contiguous int64 pairs [num_pairs, 2] "
    "of source and destination block, on the CPU"
)
