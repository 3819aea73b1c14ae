"""Rows of an embedding table by token id."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.checks import DTYPES, kernel_errors, refusal
from quire.kernels.weights import PackedWeight, QuantizedWeight


def embedding(token_ids: Tensor, table: Tensor | PackedWeight | QuantizedWeight) -> Tensor:
    """Rows of table [vocab, hidden] by token_ids [num_tokens] int64 -> [num_tokens, hidden], in the table's dtype.

    A PackedWeight or QuantizedWeight serves where the output head is tied to the embedding: rows are gathered out of
    the kernels' layout. Raises KernelError for an id that the table does not have.
    """
    backend = backend_of(token_ids)
    if token_ids.dtype is torch.int64 and token_ids.dim() == 1 and token_ids.is_contiguous():
        with kernel_errors():
            if isinstance(table, Tensor):
                if table.dim() == 2 and table.dtype in DTYPES and table.is_contiguous() and backend.holds(table):
                    return backend.embedding(token_ids, table)
            elif backend.holds(table.data):
                if isinstance(table, PackedWeight):
                    return backend.gather_packed(token_ids, table)
                return backend.gather_quantized(token_ids, table)
    raise refusal("embedding", _TAKES, token_ids=token_ids, table=table)


_TAKES = (
    "contiguous token_ids [num_tokens] int64 and a contiguous table [vocab, hidden] float32 or bfloat16, a "
    "PackedWeight or a QuantizedWeight, on one device"
)
