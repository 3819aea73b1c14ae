"""Rows of an embedding table by token id, the rotary embedding of positions, and where an encoder begins and ends: the
norm of summed embeddings, and one vector for the rows of a text."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, KERNEL_ERRORS, POOLINGS, are_ids, are_numbers, refusal
from quire.kernels.variants import Tables
from quire.kernels.weights import PackedWeight, QuantizedWeight


def embedding(token_ids: Tensor, table: Tensor | PackedWeight | QuantizedWeight) -> Tensor:
    """Rows of table [vocab, hidden] by token_ids [num_tokens] int64 -> [num_tokens, hidden], in the table's dtype.

    A PackedWeight or QuantizedWeight serves where the output head is tied to the embedding: rows are gathered out of
    the kernels' layout. Raises KernelError for an id that the table does not have.
    """
    backend = backend_of(token_ids)
    if token_ids.dtype is torch.int64 and token_ids.dim() == 1 and token_ids.is_contiguous():
        with KERNEL_ERRORS:
            if isinstance(table, Tensor):
                if table.dim() == 2 and table.dtype in DTYPES and table.is_contiguous() and backend.holds(table):
                    return backend.embedding(token_ids, table)
            elif backend.holds(table.data):
                if isinstance(table, PackedWeight):
                    return backend.gather_packed(token_ids, table)
                return backend.gather_quantized(token_ids, table)
    raise refusal("embedding", _EMBEDDING_TAKES, token_ids=token_ids, table=table)


_EMBEDDING_TAKES = (
    "contiguous token_ids [num_tokens] int64 and a contiguous table [vocab, hidden] float32 or bfloat16, a "
    "PackedWeight or a QuantizedWeight, on one device"
)


def rotary_embedding(x: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first rotary_dim dimensions of every head in place, as reference.rotary_embedding.

    x [num_tokens, num_heads, head_dim] float32 or bfloat16, of which only the last dimension must be contiguous (a
    slice of a fused qkv); positions [num_tokens] int64; cos_sin [max_positions, rotary_dim] float32, contiguous. The
    pairs that are rotated are (i, i + rotary_dim / 2), or, if `interleaved`, (2 i, 2 i + 1).
    """
    backend = backend_of(x)
    if not _fit_rotary(backend, x, positions, cos_sin):
        raise refusal("rotary_embedding", _ROTARY_TAKES, x=x, positions=positions, cos_sin=cos_sin)
    with KERNEL_ERRORS:
        backend.rotary_embedding(x, positions, cos_sin, interleaved)


def _fit_rotary(backend: Backend, x: Tensor, positions: Tensor, cos_sin: Tensor) -> bool:
    shape, table = x.shape, cos_sin.shape
    return (
        x.dtype in DTYPES
        and len(shape) == 3
        and len(table) == 2
        and (x.is_contiguous() or x.stride(2) == 1 or shape[2] == 1)
        and positions.shape == shape[:1]
        and are_ids(backend.holds, positions)
        and cos_sin.dtype is torch.float32
        and table[1] <= shape[2]
        and table[1] % 2 == 0
        and cos_sin.is_contiguous()
        and backend.holds(cos_sin)
    )


_ROTARY_TAKES = (
    "x [num_tokens, num_heads, head_dim] float32 or bfloat16 with stride 1 in the last dimension, contiguous positions "
    "[num_tokens] int64 and contiguous cos_sin [max_positions, rotary_dim] float32 with an even rotary_dim up to "
    "head_dim, on one device"
)


_MAX_TABLES = 3


def embedding_norm(tables: Tables, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of the sum of rows of up to three tables, as reference.embedding_norm -> [num_tokens, width].

    tables: each [num_rows, width] of one dtype, with ids [num_tokens] int64; without ids, the first row is added to
    each token. The first table has ids. weight and bias [width] float32. Raises KernelError for an id that its table
    does not have.
    """
    table, ids = tables[0] if tables else (weight, None)
    backend = backend_of(weight)
    if (
        ids is None
        or len(tables) > _MAX_TABLES
        or any(not _is_table(backend, t, table) or not _are_ids(backend, i, ids, t) for t, i in tables)
        or not are_numbers(backend.holds, table.shape[1:], weight, bias)
    ):
        given: dict[str, object] = {f"table {i}": each for i, (each, _) in enumerate(tables)}
        given |= {f"ids {i}": each for i, (_, each) in enumerate(tables)}
        raise refusal("embedding_norm", _EMBEDDING_NORM_TAKES, **given, weight=weight, bias=bias)
    with KERNEL_ERRORS:
        return backend.encoder.embedding_norm(tables, weight, bias, eps)


def pool_rows(x: Tensor, pooling: str) -> Tensor:
    """One vector [width] float32 of rows x [num_rows, width], at least one: as reference.pool_rows."""
    if x.dtype not in DTYPES or len(x.shape) != 2 or not len(x) or not x.is_contiguous() or pooling not in POOLINGS:
        raise refusal("pool_rows", _POOL_ROWS_TAKES, x=x, pooling=pooling)
    return backend_of(x).encoder.pool_rows(x, pooling)


def _is_table(backend: Backend, table: Tensor, first: Tensor) -> bool:
    is_like_first = table.dtype is first.dtype and len(table.shape) == 2 and table.shape[1] == first.shape[1]
    return table.dtype in DTYPES and is_like_first and table.is_contiguous() and backend.holds(table)


def _are_ids(backend: Backend, ids: Tensor | None, first: Tensor, table: Tensor) -> bool:
    """Whether they are like the ids of the first table; None needs a row that is added to all tokens."""
    if ids is None:
        return len(table) > 0
    return ids.shape == first.shape and are_ids(backend.holds, ids)


_EMBEDDING_NORM_TAKES = (
    "one to three tables [num_rows, width] float32 or bfloat16 of one dtype, contiguous, with contiguous ids "
    "[num_tokens] int64 of the first and of others or, where they have rows, None, and float32 weight (and bias) "
    "[width], on one device"
)
_POOL_ROWS_TAKES = (
    f"at least one row x [num_rows, width] float32 or bfloat16, contiguous, and one of {', '.join(POOLINGS)}"
)
