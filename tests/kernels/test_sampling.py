import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.kernels import SamplingTensors
from quire.kernels.backends import reference_sampling as reference
from tests.effort import examples
from tests.kernels.draws import drawing, make_changes
from tests.kernels.isas import ISAS, using
from tests.kernels.tolerances import assert_close


def draw(logits: Tensor, uniform: Tensor | float, *args: float, **kwargs: float) -> Tensor:
    """Every row, with each of `uniform` if that is a tensor."""
    if isinstance(uniform, Tensor):
        logits = logits.expand(len(uniform), -1)
    return kernels.sample(logits, drawing(len(logits), uniform, *args, **kwargs))


def random_row(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Some of the changes, none now and then."""

    def some(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(1, count))]

    everything = {
        "mask": some(2 * vocab),
        "banned": some(3),
        "bias": {i: rng.choice([-100.0, -0.3, 0.1, 2.5, 100.0]) for i in some(4)},
        "history": (some(50), some(50) if rng.random() < 0.8 else []),
        "repetition": rng.choice([0.5, 1.0, 1.1, 1.7]),
        "frequency": rng.choice([-0.5, 0.0, 0.3]),
        "presence": rng.choice([-0.7, 0.0, 1.3]),
    }
    return {name: value for name, value in everything.items() if rng.random() < 0.5}


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """The probability of each token of one row, by sorting."""
    ordered, ids = logits.double().sort(descending=True, stable=True)
    probs = (ordered / temperature).softmax(-1)
    probs[top_k or len(probs) :] = 0
    probs[probs < min_p * probs[0]] = 0
    probs /= probs.sum()
    probs[1:][probs.cumsum(0)[:-1] >= top_p] = 0
    return torch.zeros_like(probs).scatter(0, ids, probs / probs.sum())


def is_decided(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> bool:
    """Whether no decision of this row hangs on less than 1e-9 of the probability."""
    if temperature == 0 or logits.max() == -torch.inf:
        return True
    top = distribution(logits, temperature, top_k, 1.0, min_p)
    before_cut = top.sort(descending=True).values.cumsum(0)
    kept = distribution(logits, temperature, top_k, top_p, min_p).cumsum(0)
    cut_margin = (before_cut[:-1] - top_p).abs().min() if top_p < 1 and len(top) > 1 else torch.tensor(1.0)
    return bool(cut_margin > 1e-9) and bool((kept[:-1] - uniform).abs().amin() > 1e-9 if len(kept) > 1 else True)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 9))
def test_the_tokens_of_some_rows_are_those_of_all(seed: int, num_rows: int) -> None:
    rng, vocab = random.Random(seed), 45
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    changes = make_changes([random_row(rng, vocab) for _ in range(num_rows)], vocab) if rng.random() < 0.8 else None
    uniform = torch.tensor([rng.random() for _ in range(num_rows)], dtype=torch.float64)
    how = drawing(num_rows, uniform, rng.choice([0.0, 0.7]), rng.choice([0, 5]), 0.9, 0.01, changes)
    start = rng.randint(0, num_rows)
    end = rng.randint(start, num_rows)
    some = kernels.sample(logits[start:end], how.of_rows(start, end))
    assert torch.equal(some, kernels.sample(logits, how)[start:end])


@pytest.mark.essential
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(80), deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 17, 32, 300, 5000]),
    spread=st.sampled_from([0.1, 1.0, 5.0, 50.0]),
    step=st.sampled_from([0.0, 0.5]),
    temperature=st.sampled_from([0.0, 2e-16, 0.05, 0.7, 1.0, 3.0, 1e300]),
    top_k=st.sampled_from([0, 1, 5, 50, 2000, 99_999]),
    top_p=st.sampled_from([1.0, 1 - 2**-53, 0.99, 0.9, 0.5, 1e-6, 5e-324, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.2, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 10_000),
)
def test_tokens_and_processed_logits_are_those_of_the_reference(
    isa, vocab, spread, step, temperature, top_k, top_p, min_p, uniform, seed
):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * spread
    if step:
        logits = (logits / step).round() * step  # many ties
    changes = make_changes([random_row(rng, vocab) for _ in logits], vocab) if rng.random() < 0.7 else None
    how = drawing(3, uniform, temperature, top_k, top_p, min_p, changes)
    before = logits.clone()
    with using(isa):
        tokens = kernels.sample(logits, how)
        processed = kernels.processed_logits(logits, how, torch.tensor([2, 0, 1]))[[1, 2, 0]]
    assert torch.equal(logits, before)
    expected_tokens = reference.sample(logits, how)
    expected = reference.processed_logits(logits, how, torch.arange(3))
    for row in range(3):
        changed = reference.changed_logits(logits, changes, row)
        if is_decided(changed, temperature, top_k, top_p, min_p, uniform):
            assert tokens[row] == expected_tokens[row]
            assert torch.equal(processed[row], expected[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 7, 1.0), (1.3, 0, 0.8), (1.0, 12, 0.9)]
)
def test_frequencies_fit_the_exact_distribution(isa, temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 40, generator=generator)
    uniform = torch.rand(5000, dtype=torch.float64, generator=generator)
    with using(isa):
        tokens = draw(logits, uniform, temperature, top_k, top_p)
    expected = distribution(logits[0], temperature, top_k, top_p) * len(uniform)
    counts = tokens.bincount(minlength=40)
    drawable = expected > 0
    assert counts[~drawable].sum() == 0
    chi_square = ((counts - expected).square() / expected)[drawable].sum()
    degrees = int(drawable.sum()) - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations


@pytest.mark.parametrize("isa", ISAS)
def test_evenly_spaced_draws_invert_the_cumulative_distribution(isa):
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, 0.5]])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    with using(isa):
        tokens = draw(logits, uniform, top_p=0.95)
    assert tokens.tolist() == sorted(tokens.tolist())
    expected = distribution(logits[0], 1.0, 0, 0.95) * 1000
    assert (tokens.bincount(minlength=5) - expected).abs().max() < 1
    assert expected[2] == 0


@pytest.mark.parametrize("isa", ISAS)
class TestEdges:
    @pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
    def test_the_lowest_id_of_equals_wins(self, isa, temperature):
        logits = torch.zeros(1, 3000)
        logits[0, [700, 1900, 2999]] = 3.0
        with using(isa):
            assert draw(logits, 0.0, temperature).item() == (700 if temperature < 1 else 0)
            assert draw(logits, 0.999, temperature, top_k=1).item() == 700
            for top_p in (0.0, 1e-9):
                assert draw(logits, 0.999, temperature, top_p=top_p).item() == 700
            assert draw(logits, 0.999, temperature, top_k=2).item() == (700 if temperature == 0 else 1900)

    def test_zero_and_minus_zero_are_equal(self, isa):
        with using(isa):
            assert draw(torch.tensor([[-0.0, 0.0, -1.0]]), 0.9, top_k=1).item() == 0
            assert draw(torch.tensor([[0.0, -0.0, -1.0]]), 0.9, top_k=2).item() == 1

    @pytest.mark.parametrize("gap", [1e3, 7e15, 1e38])  # 7e15: see exp_weights under `make sanitize`
    def test_a_token_far_below_the_largest_has_no_weight(self, isa, gap):
        with using(isa):
            assert draw(torch.tensor([[0.0, -gap]]), 0.999).item() == 0

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    @pytest.mark.parametrize("top_k", [0, 1, 3])
    @pytest.mark.parametrize("top_p", [1.0, 0.5])
    def test_not_a_number_is_never_drawn(self, isa, temperature, top_k, top_p):
        logits = torch.full((1, 100), torch.nan)
        logits[0, 60] = -5.0
        with using(isa):
            assert draw(logits, 0.99, temperature, top_k, top_p).item() == 60

    @pytest.mark.parametrize("value", [torch.nan, -torch.inf])
    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_a_row_without_any_number_gives_token_0(self, isa, value, temperature):
        with using(isa):
            assert draw(torch.full((2, 100), value), 0.99, temperature, top_k=5, top_p=0.5).tolist() == [0, 0]

    @pytest.mark.parametrize("top_p", [1.0, 0.5])
    def test_infinite_logits_share_all_the_probability(self, isa, top_p):
        logits = torch.randn(1, 2000)
        logits[0, [10, 1500]] = torch.inf
        with using(isa):
            assert draw(logits, 0.1, top_p=top_p).item() == 10
            assert draw(logits, 0.9, top_p=top_p).item() == (1500 if top_p == 1 else 10)

    def test_a_vocabulary_of_one(self, isa):
        with using(isa):
            for temperature, top_k, top_p in [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 0.1)]:
                assert draw(torch.tensor([[-3.0]]), 0.5, temperature, top_k, top_p).item() == 0

    @pytest.mark.parametrize(
        ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (5000, 0.95, 0.0), (0, 0.9, 1e-4)]
    )
    @pytest.mark.parametrize("spread", [3.0, 0.1])
    def test_a_large_vocabulary(self, isa, top_k, top_p, min_p, spread):
        logits = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(1)) * spread
        how = drawing(3, 0.37, 0.8, top_k, top_p, min_p)
        with using(isa):
            tokens = kernels.sample(logits, how)
        assert tokens.tolist() == reference.sample(logits, how).tolist()


@pytest.mark.parametrize("isa", ISAS)
class TestMasks:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_likeliest_allowed_token_comes_where_nothing_is_left(self, isa, temperature):
        logits = torch.arange(100.0).repeat(4, 1)
        logits[2] = torch.nan
        rows = [
            {"mask": [7, 70, 40], "banned": [7, 70, 40]},
            {"banned": list(range(100))},
            {"mask": [33, 50], "banned": [33]},
            {"mask": [99, 3], "banned": [99]},
        ]
        with using(isa):
            tokens = kernels.sample(logits, drawing(4, 0.9, temperature, changes=make_changes(rows, 100)))
        assert tokens.tolist() == [70, 0, 33, 3]

    def test_bits_beyond_the_vocabulary_mean_nothing(self, isa):
        changes = make_changes([{"mask": [5]}], 33)
        changes.masks[0, 1] = -2
        with using(isa):
            assert draw(torch.zeros(1, 33), 0.99, changes=changes).item() == 5


def test_rows_with_their_own_parameters_and_a_stride_do_not_disturb_each_other():
    wide = torch.randn(6, 1200)
    logits = wide[:, :1000]
    rng = random.Random(2)
    rows = [random_row(rng, 1000) for _ in range(6)]
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 1.0]).double()
    top_k = torch.tensor([0, 0, 10, 5, 0, 1])
    top_p, uniform = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.3]).double(), torch.rand(6).double()
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.01, 0.5]).double()
    per_row = (temperature, top_k, top_p, min_p, uniform)
    together = kernels.sample(logits, SamplingTensors(*per_row, make_changes(rows, 1000)))
    alone = [
        kernels.sample(
            logits[i : i + 1], SamplingTensors(*(t[i : i + 1] for t in per_row), make_changes(rows[i : i + 1], 1000))
        ).item()
        for i in range(6)
    ]
    assert together.tolist() == alone


def test_no_rows_give_no_tokens():
    assert draw(torch.empty(0, 10), 0.5).shape == (0,)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(60), deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 17, 300, 5000]),
    spread=st.sampled_from([0.1, 5.0, 50.0]),
    step=st.sampled_from([0.0, 0.5]),
    num_top=st.sampled_from([0, 1, 5, 2000]),
    normalized=st.booleans(),
    num_holes=st.sampled_from([0, 1, 9999]),
    seed=st.integers(0, 10_000),
)
def test_logprobs_are_those_of_the_reference(isa, vocab, spread, step, num_top, normalized, num_holes, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(5, vocab + 7, generator=generator) * spread
    logits = ((wide / step).round() * step if step else wide)[:, :vocab]
    logits[:, torch.randperm(vocab, generator=generator)[:num_holes]] = [torch.nan, -torch.inf][seed % 2]
    logits[4, seed % vocab] = torch.inf
    rows = torch.tensor([3, 0, 0, 4])
    token_ids = torch.randint(vocab, (4,), generator=generator)
    num_top = min(num_top, vocab)
    with using(isa):
        results = kernels.top_logprobs(logits, token_ids, num_top, rows=rows, normalized=normalized)
        alone = kernels.top_logprobs(logits[:1].contiguous(), token_ids[1:2], num_top, normalized=normalized)
    for result, single in zip(results, alone, strict=True):
        assert torch.equal(result[1:2], single)
    ids, logprobs, ranks = reference.top_logprobs(logits, token_ids, num_top, rows, normalized)
    assert torch.equal(results[0], ids)
    assert torch.equal(results[2], ranks)
    assert_close("top_logprobs", results[1], logprobs)


def test_the_bits_of_logprobs_are_those_of_every_other_instruction_set():
    logits = torch.randn(9, 20_011, generator=torch.Generator().manual_seed(0)) * 4
    results = []
    for isa in ISAS:
        with using(isa):
            results.append(kernels.top_logprobs(logits, torch.arange(9), 20_011))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
