"""The kernels of encoders in the native extension."""

from typing import Any

import torch
from torch import Tensor

from quire.kernels.backends.native.arguments import DTYPE_CODES, encoder_changes
from quire.kernels.backends.workspace import empty
from quire.kernels.checks import POOLINGS
from quire.kernels.variants import DistanceTerms, EncoderVariant, Tables


class NativeEncoderKernels:
    """As EncoderKernels."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        scale: float,
        variant: EncoderVariant,
        terms: DistanceTerms | None,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        out = empty((num_tokens, num_heads, head_dim), query.dtype)
        # A cache whose blocks are the rows of keys and values.
        cache = key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)
        lens = query_start.data_ptr(), seq_lens.data_ptr(), 0, 0, 0
        sizes = num_tokens, seq_lens.shape[0], num_heads, key.shape[1], head_dim, num_tokens, 1
        given = query.data_ptr(), query.stride(0), False, *cache, *lens, *sizes, *encoder_changes(scale, variant, terms)
        self._native.paged_attention(DTYPE_CODES[query.dtype], *given, out.data_ptr())
        return out

    def embedding_norm(self, tables: Tables, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        width, dtype = tables[0][0].shape[1], tables[0][0].dtype
        rows = next(ids.shape[0] for _, ids in tables if ids is not None)
        out = empty((rows, width), dtype)
        given = [0, 0, 0] * 3
        for i, (table, ids) in enumerate(tables):
            given[3 * i : 3 * i + 3] = table.data_ptr(), table.shape[0], 0 if ids is None else ids.data_ptr()
        norm = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), eps
        self._native.embedding_norm(DTYPE_CODES[dtype], len(tables), *given, *norm, out.data_ptr(), rows, width)
        return out

    def pool_rows(self, x: Tensor, pooling: str) -> Tensor:
        rows, width = x.shape
        out = empty((width,), torch.float32)
        code = POOLINGS.index(pooling)
        self._native.pool_rows(DTYPE_CODES[x.dtype], code, x.data_ptr(), rows, width, out.data_ptr())
        return out
