"""Rows of an embedding table by token id."""

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import check_range, native_errors, refusal
from quire.kernels.matmul import PackedWeight
from quire.kernels.quantized import QuantizedWeight, gather_quantized
from quire.kernels.workspace import empty


def embedding(token_ids: Tensor, table: Tensor | PackedWeight | QuantizedWeight) -> Tensor:
    """Rows of table [vocab, hidden] by token_ids [num_tokens] int64 -> [num_tokens, hidden], in the table's dtype.

    A PackedWeight or QuantizedWeight serves where the output head is tied to the embedding: rows are gathered out of
    the kernels' layout.
    """
    if not (token_ids.dtype is torch.int64 and token_ids.dim() == 1 and token_ids.is_contiguous() and token_ids.is_cpu):
        raise refusal("embedding", _TAKES, token_ids=token_ids, table=table)
    with native_errors():
        if isinstance(table, QuantizedWeight):
            if native is None:
                return _gather_rows(token_ids, table.dequantized().to(table.dtype))
            return gather_quantized(token_ids, table)
        if isinstance(table, PackedWeight):
            return _gather_packed(token_ids, table)
        if table.dim() == 2 and table.dtype in DTYPE_CODES and table.is_contiguous() and table.is_cpu:
            return _gather_rows(token_ids, table)
    raise refusal("embedding", _TAKES, token_ids=token_ids, table=table)


def _gather_packed(token_ids: Tensor, table: PackedWeight) -> Tensor:
    if native is None:
        return _gather_rows(token_ids, table.data)
    count = token_ids.numel()
    out = empty((count, table.k), table.dtype)
    size = table.dtype.itemsize
    native.gather_packed(token_ids.data_ptr(), count, table.address, table.n, table.k, size, out.data_ptr())
    return out


def _gather_rows(token_ids: Tensor, table: Tensor) -> Tensor:
    vocab, hidden = table.shape
    if native is None:
        check_range("embedding: token id", token_ids, vocab)
        return reference.embedding(token_ids, table)
    count = token_ids.numel()
    out = empty((count, hidden), table.dtype)
    row_bytes = hidden * table.element_size()
    native.gather_rows(token_ids.data_ptr(), count, table.data_ptr(), vocab, row_bytes, out.data_ptr())
    return out


_TAKES = (
    "contiguous token_ids [num_tokens] int64 and a contiguous table [vocab, hidden] float32 or bfloat16 or a "
    "PackedWeight, on the CPU"
)
