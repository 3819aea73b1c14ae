"""100,000 draws of each setting against the exact distribution, worked out by a plain definition."""

import dataclasses

import pytest
import torch
from msgspec.structs import replace

from quire import kernels
from quire.common.batch import Draw
from quire.runner.sampling.draw_tensors import DrawTensors
from quire.runner.sampling.random import random_key, uniform
from tests.kernels.isas import needs_native
from tests.sampling.plain import Mask, changed, probabilities, sequence

VOCAB = 70
NUM_DRAWS = 100_000
PROMPT, OUTPUT = [3, 9, 9, 14, 60], [9, 21, 21, 33, 3, 21]
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
PLAIN = Draw(1.0, 0, 1.0, random_key(5, 0))

SETTINGS = {
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 2.5},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "min-p, top-k, top-p": {"temperature": 1.4, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((5, 3.0), (6, -100.0), (9, 1.0))},
    "allowed": {"allowed_token_ids": (1, 2, 3, 40, 69)},
    "bad words": {"bad_words": ((5,), (3, 21, 8), (9, 7), (40,))},
    "min tokens": {"min_tokens": 7, "stop_token_ids": (0, 21)},
    "everything": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.001,
        **PENALTIES,
        "logit_bias": ((5, 3.0), (20, 2.0)),
        "allowed_token_ids": tuple(range(2, 68)),
        "bad_words": ((5, 6), (21, 30)),
        "min_tokens": 9,
        "stop_token_ids": (12,),
    },
}


def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5


@pytest.fixture(scope="module")
def random_numbers() -> torch.Tensor:
    key = random_key(5, 0)
    return torch.tensor([uniform(key, position) for position in range(NUM_DRAWS)], dtype=torch.float64)


@needs_native
@pytest.mark.parametrize("mask", [None, Mask(range(0, VOCAB, 2), VOCAB)], ids=["", "masked"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_frequencies_fit_the_exact_distribution(random_numbers, setting, mask):
    draw = replace(PLAIN, **setting)
    num_rows = 1000
    samples = sequence((draw,) * num_rows, PROMPT, OUTPUT, mask=mask)
    how = DrawTensors(samples.drawn.draws, VOCAB).at([samples], {})
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for numbers in random_numbers.split(num_rows):
        tokens = kernels.sample(logits().expand(num_rows, -1), dataclasses.replace(how, uniform=numbers))
        counts += tokens.bincount(minlength=VOCAB)
    expected = probabilities(changed(logits(), draw, PROMPT, OUTPUT, mask), draw) * NUM_DRAWS
    drawable = expected > 0
    assert counts[~drawable].sum() == 0
    chi_square = ((counts - expected).square() / expected)[drawable].sum()
    degrees = int(drawable.sum()) - 1
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations
