"""Hidden states that something besides the model reads, copied while the model runs."""

from collections.abc import Callable
from typing import Any

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
        self._places = torch.arange(num_tokens)

    def run(
        self, layer: Callable[..., Any], x: Tensor | None, residual: Tensor, batch: BatchTensors, kv: LayerCache
    ) -> Any:
        """Keep what the layer gets, and run it."""
        self.keep(residual, batch)
        if x is not None:
            kernels.add(x, self.rows[: len(x)])
        return layer(x, residual, batch, kv)

    def keep(self, hidden: Tensor, _: BatchTensors) -> Tensor:
        """Keep hidden [num_tokens, width], and return it."""
        half = hidden.shape[1] // 2
        kernels.write_latents(hidden[:, :half], hidden[:, half:], self.rows.unsqueeze(0), self._places[: len(hidden)])
        return hidden


def beside(left: Tensor, right: Tensor) -> Tensor:
    """left [num_tokens, m], right [num_tokens, n] -> [num_tokens, m + n], in new memory."""
    both = left.new_empty(1, len(left), left.shape[1] + right.shape[1])
    if not both.is_meta:
        kernels.write_latents(left, right, both, torch.arange(len(left)))
    return both[0]
