"""Where an encoder begins and ends: the norm of summed embeddings, and from the rows of a text to one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import DTYPES, POOLINGS, kernel_errors, refusal

_MAX_TABLES = 3


def embedding_norm(
    tables: Sequence[tuple[Tensor, Tensor | None]], weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
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
        or any(not _is_table(backend, t, table) or not _are_ids(backend, i, ids) for t, i in tables)
        or any(not _is_vector(backend, w, table) for w in (weight, bias) if w is not None)
    ):
        given: dict[str, object] = {f"table {i}": each for i, (each, _) in enumerate(tables)}
        given |= {f"ids {i}": each for i, (_, each) in enumerate(tables)}
        raise refusal("embedding_norm", _EMBEDDING_NORM_TAKES, **given, weight=weight, bias=bias)
    with kernel_errors():
        return backend.embedding_norm(tables, weight, bias, eps)


def pool_rows(x: Tensor, pooling: str) -> Tensor:
    """One vector [width] float32 of rows x [num_rows, width], at least one: as reference.pool_rows."""
    if x.dtype not in DTYPES or len(x.shape) != 2 or not len(x) or not x.is_contiguous() or pooling not in POOLINGS:
        raise refusal("pool_rows", _POOL_ROWS_TAKES, x=x, pooling=pooling)
    return backend_of(x).pool_rows(x, pooling)


def _is_table(backend: Backend, table: Tensor, first: Tensor) -> bool:
    is_like_first = table.dtype is first.dtype and len(table.shape) == 2 and table.shape[1] == first.shape[1]
    return table.dtype in DTYPES and is_like_first and table.is_contiguous() and backend.holds(table)


def _are_ids(backend: Backend, ids: Tensor | None, first: Tensor) -> bool:
    if ids is None:
        return True
    return (ids.dtype is torch.int64 and ids.shape == first.shape and len(ids.shape) == 1) and (
        ids.is_contiguous() and backend.holds(ids)
    )


def _is_vector(backend: Backend, weight: Tensor, table: Tensor) -> bool:
    is_float32 = weight.dtype is torch.float32
    return is_float32 and weight.shape == table.shape[1:] and weight.is_contiguous() and backend.holds(weight)


_EMBEDDING_NORM_TAKES = (
    "one to three tables [num_rows, width] float32 or bfloat16 of one dtype, contiguous, with contiguous ids "
    "[num_tokens] int64 of the first and of others or None, and float32 weight (and bias) [width], on one device"
)
_POOL_ROWS_TAKES = (
    f"at least one row x [num_rows, width] float32 or bfloat16, contiguous, and one of {', '.join(POOLINGS)}"
)
