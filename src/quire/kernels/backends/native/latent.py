"""The kernels of multi-head latent attention in the native extension."""

from typing import Any

from torch import Tensor

from quire.kernels.backends import key_layout
from quire.kernels.backends.native.arguments import DTYPE_CODES
from quire.kernels.backends.workspace import WeightMemory, empty
from quire.kernels.variants import Sequences
from quire.kernels.weights import HeadWeights


class NativeLatentKernels:
    """As LatentKernels."""

    make_cache = staticmethod(key_layout.make_latent_cache)
    is_cache = staticmethod(key_layout.is_latent_cache)

    def __init__(self, native: Any, weights: WeightMemory) -> None:
        self._native = native
        self._weights = weights

    def write(self, latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
        item, rank = latents.element_size(), latents.shape[1]
        given = latents.data_ptr(), latents.stride(0) * item, rank * item, rotary.data_ptr(), rotary.stride(0) * item
        self._native.write_latents(self._cache(cache), *given, slots.data_ptr(), slots.shape[0])

    def copy_slots(self, cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
        slots = src_slots.data_ptr(), dst_slots.data_ptr(), src_slots.shape[0]
        self._native.copy_slots(self._cache(cache), *slots)

    def attention(self, query: Tensor, cache: Tensor, seqs: Sequences, value_dim: int, scale: float) -> Tensor:
        query_start, seq_lens, block_tables = seqs
        (num_tokens, num_heads, width), (num_blocks, block_size, _) = query.shape, cache.shape
        out = empty((num_tokens, num_heads, value_dim), query.dtype)
        given = query.data_ptr(), cache.data_ptr(), cache.stride(0)
        tables = query_start.data_ptr(), seq_lens.data_ptr(), block_tables.data_ptr(), block_tables.stride(0)
        sizes = block_tables.shape[1], num_tokens, seq_lens.shape[0], num_heads, width, value_dim
        numbers = num_blocks, block_size, scale
        self._native.latent_attention(DTYPE_CODES[query.dtype], *given, *tables, *sizes, *numbers, out.data_ptr())
        return out

    def pack_heads(self, weights: Tensor) -> HeadWeights:
        (num_heads, n, k), size = weights.shape, weights.element_size()
        num_bytes = int(self._native.packed_bytes(n, k, size))
        data = self._weights.empty(num_heads * num_bytes)
        for head, weight in enumerate(weights):
            self._native.pack(
                weight.data_ptr(), weight.stride(0) * size, n, k, size, data.data_ptr() + head * num_bytes
            )
        return HeadWeights(weights.shape, weights.dtype, data)

    def multiply_heads(self, x: Tensor, weights: HeadWeights) -> Tensor:
        (num_tokens, num_heads), tail = x.shape[:2], x.shape[2] - weights.k
        out = empty((num_tokens, num_heads, weights.n + tail), x.dtype)
        given = x.data_ptr(), x.stride(0), x.stride(1), num_tokens, num_heads
        matrices = weights.n, weights.k, tail, weights.address
        self._native.multiply_heads(DTYPE_CODES[x.dtype], *given, *matrices, out.data_ptr())
        return out

    def _cache(self, cache: Tensor) -> Any:
        """native.KvCache: values of one head without keys."""
        num_blocks, block_size, width = cache.shape
        item = cache.element_size()
        sizes = num_blocks, 1, 0, width * item, block_size
        return self._native.kv_cache(0, cache.data_ptr(), 0, cache.stride(0) * item, *sizes)
