"""The layout of the KV cache on the CPU: keys lie dimension-major within a block (ADR 0002), latents in rows."""

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels.checks import DTYPES, describe

BLOCK_ALIGNMENT = 64
"""Bytes of a cache line, on which a flat buffer starts."""

LANE_BYTES = 4
"""Bytes of a key that lie together in the cache: one float32, two bfloat16 or four int8."""

CACHE_LAYOUT = (
    "k_cache [num_blocks, num_kv_heads, head_dim / pack, block_size, pack] and v_cache [num_blocks, num_kv_heads, "
    "block_size, head_dim], float32 (pack 1), bfloat16 (pack 2) or int8 (pack 4; two lanes more, the scales of key and "
    "value), each block contiguous"
)


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
    blocks = _block_rows(buffer, num_blocks, block_bytes).view(dtype)
    keys, values = blocks.tensor_split([key_bytes // dtype.itemsize], dim=1)
    return (
        keys.view(num_blocks, num_kv_heads, lanes, block_size, pack),
        values.view(num_blocks, num_kv_heads, block_size, head_dim),
    )


def make_latent_cache(buffer: Tensor, num_blocks: int, block_size: int, width: int, dtype: torch.dtype) -> Tensor:
    """View a buffer, as that of `make_layer_cache`, as one layer's latents [num_blocks, block_size, width].

    Kernels read them in units of LANE_BYTES.
    """
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "width": width}
    if dtype not in DTYPES or min(sizes.values()) < 1 or width * dtype.itemsize % LANE_BYTES:
        raise KernelError(
            "a cache of latents has positive sizes, and holds float32 or bfloat16 of an even width; "
            f"got {dtype} {sizes}"
        )
    block_bytes = block_size * width * dtype.itemsize
    return _block_rows(buffer, num_blocks, block_bytes).view(dtype).view(num_blocks, block_size, width)


def is_latent_cache(cache: Tensor) -> bool:
    """Whether it is one that `make_latent_cache` makes, or a separate one of such a shape."""
    return (
        cache.dim() == 3
        and cache.dtype in DTYPES
        and min(cache.shape) > 0
        and cache.shape[2] * cache.element_size() % LANE_BYTES == 0
        and _blocks_are_contiguous(cache, (cache.shape[2], 1))
    )


def _block_rows(buffer: Tensor, num_blocks: int, block_bytes: int) -> Tensor:
    """The bytes of each block, [num_blocks, block_bytes]."""
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
    return buffer[: num_blocks * block_bytes].view(num_blocks, -1) if is_flat else buffer[:num_blocks, :block_bytes]


def is_layer_cache(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether these are a layer's caches as `make_layer_cache` makes them, or separate ones of the same shape."""
    if v_cache.dim() != 4 or k_cache.dim() != 5 or not _holds(v_cache.dtype) or min(v_cache.shape) < 1:
        return False
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    lanes, pack = _lanes(head_dim, v_cache.dtype)
    return (
        k_cache.dtype is v_cache.dtype
        and head_dim % pack == 0
        and k_cache.shape == (num_blocks, num_kv_heads, lanes, block_size, pack)
        and _blocks_are_contiguous(k_cache, (lanes * block_size * pack, block_size * pack, pack, 1))
        and _blocks_are_contiguous(v_cache, (block_size * head_dim, head_dim, 1))
    )


def _holds(dtype: torch.dtype) -> bool:
    return dtype in DTYPES or dtype is torch.int8


def _lanes(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Lanes of one key, scales included, and the elements in each."""
    pack = LANE_BYTES // dtype.itemsize
    return head_dim // pack + (2 if dtype is torch.int8 else 0), pack


def _blocks_are_contiguous(cache: Tensor, strides: tuple[int, ...]) -> bool:
    return cache.stride()[1:] == strides or cache.select(0, 0).is_contiguous()  # sizes of 1 may have any stride
