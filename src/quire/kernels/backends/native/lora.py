"""Matrices of adapters as the native kernels read them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.weights import Factors, LoRAWeight


def pack_lora(
    factors: Sequence[Factors | None], sizes: tuple[int, ...], k: int, dtype: torch.dtype, memory: Tensor | None
) -> LoRAWeight:
    """As Backend.pack_lora: A and B in the layout that LoRAWeight describes, in one piece of memory."""
    ranks = tuple(0 if pair is None else len(pair[0]) for pair in factors)
    in_line = 64 // dtype.itemsize
    shapes: list[tuple[int, ...]] = [(-(-sum(ranks) // 4), -(-k // in_line), 4, in_line)]
    shapes += [(-(-n // 32), rank, 32) for n, rank in zip(sizes, ranks, strict=True)]
    counts = list(map(math.prod, shapes))
    device = next(pair[0].device for pair in factors if pair is not None)
    memory = torch.empty(sum(counts) * dtype.itemsize, dtype=torch.uint8, device=device) if memory is None else memory
    numbers = memory[: sum(counts) * dtype.itemsize].view(dtype)
    a, *b = (part.view(shape) for part, shape in zip(torch.split(numbers, counts), shapes, strict=True))
    rows, first = torch.zeros(4 * len(a), a.shape[1] * in_line, dtype=dtype, device=device), 0
    for pair, panels, rank in zip(factors, b, ranks, strict=True):
        if pair is not None:
            rows[first : first + rank, :k] = pair[0]
            first += rank
            outputs = torch.zeros(32 * len(panels), rank, dtype=dtype, device=device)
            outputs[: len(pair[1])] = pair[1]
            panels.copy_(outputs.view(-1, 32, rank).transpose(1, 2))
    a.copy_(rows.view(len(a), 4, -1, in_line).transpose(1, 2))
    return LoRAWeight(sizes, k, dtype, ranks, a, tuple(b))
