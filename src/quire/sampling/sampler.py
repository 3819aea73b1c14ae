"""Draws the next token of every row that wants one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.sampling.random import uniform


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One entry per row of logits."""

    temperature: Tensor  # [num_rows] float32
    top_k: Tensor  # [num_rows] int32, 0: all
    top_p: Tensor  # [num_rows] float32
    uniform: Tensor  # [num_rows] float64

    @classmethod
    def build(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        keys: Sequence[bytes],
        positions: Sequence[int],
    ) -> "SamplingTensors":
        """From plain values; `positions` are those of the tokens to be drawn."""
        draws = [uniform(k, p) if t > 0 else 0.0 for t, k, p in zip(temperature, keys, positions, strict=True)]
        return cls(
            torch.tensor(temperature, dtype=torch.float32),
            torch.tensor(top_k, dtype=torch.int32),
            torch.tensor(top_p, dtype=torch.float32),
            torch.tensor(draws, dtype=torch.float64),
        )


def sample(logits: Tensor, params: SamplingTensors) -> list[int]:
    """Token ids for logits [num_rows, vocab] float32; each row's outcome depends on that row alone."""
    token_ids: list[int] = kernels.sample(
        logits, params.temperature, params.top_k, params.top_p, params.uniform
    ).tolist()
    return token_ids
