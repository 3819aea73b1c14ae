"""Draws so near a bound between two tokens that rough weights cannot decide them."""

import math
from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.backends import reference_sampling as reference
from tests.kernels.draws import drawing
from tests.kernels.isas import ISAS, using

NEAR = torch.tensor([-1e-10, -1e-12, -1e-13, 1e-13, 1e-12, 1e-10], dtype=torch.float64)
"""Of the sum of all weights, whose rounding errors are below 1e-14."""


def near_bounds(probabilities: torch.Tensor) -> torch.Tensor:
    """Values on both sides of each bound between two tokens, in order."""
    bounds = probabilities.cumsum(0)[:-1]
    return (bounds[:, None] + NEAR).flatten().clamp(0, 1 - 1e-15)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("vocab", [2, 40, 700])
class TestBounds:
    def test_of_the_draw(self, isa: str, vocab: int, temperature: float) -> None:
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
        uniform = near_bounds((logits[0].double() / temperature).softmax(0))
        how = drawing(len(uniform), uniform, temperature)
        rows = logits.expand(len(uniform), -1)
        with using(isa):
            tokens = kernels.sample(rows, how)
        assert torch.equal(tokens, reference.sample(rows, how))

    def test_of_top_p(self, isa: str, vocab: int, temperature: float) -> None:
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)).sort(descending=True).values
        top_p = near_bounds((logits[0].double() / temperature).softmax(0))
        how = replace(drawing(len(top_p), 1 - 1e-7, temperature), top_p=top_p)
        rows = logits.expand(len(top_p), -1)
        with using(isa):
            tokens = kernels.sample(rows, how)
        assert torch.equal(tokens, reference.sample(rows, how))


@pytest.mark.parametrize("isa", ISAS)
def test_equal_halves(isa: str) -> None:
    how = drawing(3, torch.tensor([0.0, 0.5 - 1e-16, 0.5], dtype=torch.float64))
    with using(isa):
        assert kernels.sample(torch.zeros(3, 2), how).tolist() == [0, 0, 1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("nudge", "expected"), [(-1e-12, 1), (1e-12, 0)])
def test_min_p_between_two_floats(isa: str, nudge: float, expected: int) -> None:
    how = drawing(1, 0.999, min_p=math.exp(-1) + nudge)
    with using(isa):
        assert kernels.sample(torch.tensor([[0.0, -1.0]]), how).item() == expected
