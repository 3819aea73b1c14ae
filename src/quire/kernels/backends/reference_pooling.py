"""The definitions of the kernels where an encoder begins and ends, beside the others in reference.py."""

import torch
from torch import Tensor

from quire.kernels.backends.reference import embedding, layer_norm
from quire.kernels.variants import Tables


def embedding_norm(tables: Tables, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of the sum of rows: of each table [num_rows, width] those of its ids [num_tokens], or the first."""
    rows = [table[:1].float() if ids is None else embedding(ids, table).float() for table, ids in tables]
    return layer_norm(sum(rows[1:], rows[0]), weight, bias, eps).to(tables[0][0].dtype)


def pool_rows(x: Tensor, pooling: str) -> Tensor:
    """Rows [num_rows, width] to one vector [width] float32: their `mean`, their sum divided by the root of their number
    (`sum_by_root`), the mean in which row i counts i + 1 times (`weighted_mean`), the largest of each column (`max`).
    """
    rows = x.float()
    if pooling == "max":
        return rows.amax(0)
    weights = torch.ones(len(x), device=x.device)
    if pooling == "weighted_mean":
        weights = weights.cumsum(0)
    total = weights.sum()
    return (rows * weights[:, None]).sum(0) / (total.sqrt() if pooling == "sum_by_root" else total)
