"""Rows of an embedding table by token id."""

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import DTYPE_CODES, native
from quire.kernels.checks import refusal
from quire.kernels.matmul import PackedWeight
from quire.kernels.quantized import QuantizedWeight, gather_quantized


def embedding(token_ids: Tensor, table: Tensor | PackedWeight | QuantizedWeight) -> Tensor:
    """Rows of table [vocab, hidden] by token_ids [num_tokens] int64 -> [num_tokens, hidden], in the table's dtype.

    A PackedWeight or QuantizedWeight serves where the output head is tied to the embedding: rows are gathered out of
    the kernels' layout.
    """
    if not (token_ids.dtype is torch.int64 and token_ids.dim() == 1 and token_ids.is_contiguous() and token_ids.is_cpu):
        raise refusal("embedding", _TAKES, token_ids=token_ids, table=table)
    if isinstance(table, PackedWeight | QuantizedWeight):
        vocab = table.n
        out, outside = _gather_packed(token_ids, table)
    elif table.dim() == 2 and table.dtype in DTYPE_CODES and table.is_contiguous() and table.is_cpu:
        vocab = table.shape[0]
        out, outside = _gather_rows(token_ids, table)
    else:
        raise refusal("embedding", _TAKES, token_ids=token_ids, table=table)
    if outside >= 0:
        takes = f"token ids from 0 to {vocab - 1}, the rows of the table"
        raise refusal("embedding", takes, **{f"token_ids[{outside}]": int(token_ids[outside])})
    return out


def _gather_packed(token_ids: Tensor, table: PackedWeight | QuantizedWeight) -> tuple[Tensor, int]:
    """The rows, and the index of the first id that is not in the table, or -1."""
    if isinstance(table, QuantizedWeight):
        if native is None:
            return _gather_rows(token_ids, table.dequantized().to(table.dtype))
        return gather_quantized(token_ids, table)
    if native is None:
        return _gather_rows(token_ids, table.data)
    count = token_ids.numel()
    out = torch.empty((count, table.k), dtype=table.dtype)
    size = table.dtype.itemsize
    outside = native.gather_packed(token_ids.data_ptr(), count, table.address, table.n, table.k, size, out.data_ptr())
    return out, outside


def _gather_rows(token_ids: Tensor, table: Tensor) -> tuple[Tensor, int]:
    """As _gather_packed, from a plain table."""
    vocab, hidden = table.shape
    if native is None:
        wrong = ((token_ids < 0) | (token_ids >= vocab)).nonzero()
        return (table, int(wrong[0])) if len(wrong) else (reference.embedding(token_ids, table), -1)
    count = token_ids.numel()
    out = torch.empty((count, hidden), dtype=table.dtype)
    row_bytes = hidden * table.element_size()
    outside = native.gather_rows(token_ids.data_ptr(), count, table.data_ptr(), vocab, row_bytes, out.data_ptr())
    return out, outside


_TAKES = (
    "contiguous token_ids [num_tokens] int64 and a contiguous table [vocab, hidden] float32 or bfloat16 or a "
    "PackedWeight, on the CPU"
)
