"""Hidden states that something besides the model reads, copied while the model runs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.models.layers.batch_tensors import BatchTensors, LayerCache


class Watch:
    """Keeps the hidden states at one place of a model. They always lie in the same memory, so that a recorded pass
    writes them too."""

    def __init__(self, width: int, dtype: torch.dtype, num_tokens: int) -> None:
        self.rows = torch.zeros(num_tokens, width, dtype=dtype)
        """Of the latest pass, in the order of its tokens."""

    def run(
        self, layer: Callable[..., Any], x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache
    ) -> Any:
        """Keep what the layer gets, and run it."""
        self.keep(residual)
        if x is not None:
            kernels.add(x, self.rows[: len(x)])
        return layer(x, residual, batch, kv)

    def keep(self, hidden: Tensor, _: BatchTensors | None = None) -> Tensor:
        """Keep hidden [num_tokens, width], and return it."""
        half = hidden.shape[1] // 2
        _write_beside(hidden[:, :half], hidden[:, half:], self.rows)
        return hidden


def beside(left: Tensor, right: Tensor) -> Tensor:
    """left [num_tokens, m], right [num_tokens, n] -> [num_tokens, m + n], in memory of its own."""
    backend = kernels.backend_of(left)
    both = backend.empty((len(left), left.shape[1] + right.shape[1]), left.dtype)
    _write_beside(left, right, both)
    return both


def _write_beside(left: Tensor, right: Tensor, rows: Tensor) -> None:
    """Write to the first rows."""
    if not rows.is_meta:
        kernels.write_latents(left, right, rows.unsqueeze(0), _numbers((len(left) - 1).bit_length())[: len(left)])


@cache
def _numbers(num_bits: int) -> Tensor:
    """All numbers of at most `num_bits` bits, in memory that stays where it is, since recordings read it."""
    return torch.from_numpy(np.arange(1 << num_bits))
