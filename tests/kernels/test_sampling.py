import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.errors import KernelError
from quire.kernels import reference
from tests.kernels.isas import ISAS, using


def draw(logits: Tensor, uniform: Tensor | float, temperature=1.0, top_k=0, top_p=1.0) -> Tensor:
    """Every row with the same parameters, and every row with each of `uniform`, if that is a tensor."""
    if isinstance(uniform, Tensor):
        logits = logits.expand(len(uniform), -1)
    num_rows = len(logits)
    full = torch.full((num_rows,), 1.0, dtype=torch.float64)
    return kernels.sample(
        logits, full * temperature, torch.full((num_rows,), top_k, dtype=torch.int64), full * top_p, full * uniform
    )


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The probability of each token of one row, by sorting."""
    ordered, ids = logits.double().sort(descending=True, stable=True)
    probs = (ordered / temperature).softmax(-1)
    probs[top_k or len(probs) :] = 0
    probs /= probs.sum()
    probs[1:][probs.cumsum(0)[:-1] >= top_p] = 0
    return torch.zeros_like(probs).scatter(0, ids, probs / probs.sum())


def is_decided(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> bool:
    """Whether no decision of this row hangs on less than 1e-9 of the probability."""
    top = distribution(logits, temperature, top_k, 1.0)
    before_cut = top.sort(descending=True).values.cumsum(0)
    kept = distribution(logits, temperature, top_k, top_p).cumsum(0)
    cut_margin = (before_cut[:-1] - top_p).abs().min() if top_p < 1 and len(top) > 1 else torch.tensor(1.0)
    return bool(cut_margin > 1e-9) and bool((kept[:-1] - uniform).abs().amin() > 1e-9 if len(kept) > 1 else True)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 17, 300, 5000]),
    spread=st.sampled_from([0.1, 1.0, 5.0, 50.0]),
    step=st.sampled_from([0.0, 0.5]),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 2000, 99_999]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 1e-6]),
    uniform=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 10_000),
)
def test_tokens_are_those_of_the_reference(isa, vocab, spread, step, temperature, top_k, top_p, uniform, seed):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if step:
        logits = (logits / step).round() * step  # many ties
    rows = [row for row in logits if temperature == 0 or is_decided(row, temperature, top_k, top_p, uniform)]
    if not rows:
        return
    logits = torch.stack(rows)
    full = torch.ones(len(rows), dtype=torch.float64)
    parameters = (full * temperature, (full * top_k).long(), full * top_p, full * uniform)
    before = logits.clone()
    with using(isa):
        tokens = kernels.sample(logits, *parameters)
    assert tokens.tolist() == reference.sample(logits, *parameters).tolist()
    assert torch.equal(logits, before)


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
            assert draw(logits, 0.999, temperature, top_p=1e-9).item() == 700
            assert draw(logits, 0.999, temperature, top_k=2).item() == (700 if temperature == 0 else 1900)

    def test_zero_and_minus_zero_are_equal(self, isa):
        with using(isa):
            assert draw(torch.tensor([[-0.0, 0.0, -1.0]]), 0.9, top_k=1).item() == 0
            assert draw(torch.tensor([[0.0, -0.0, -1.0]]), 0.9, top_k=2).item() == 1

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

    @pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (5000, 0.95)])
    def test_a_large_vocabulary(self, isa, top_k, top_p):
        logits = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(1)) * 3
        full = torch.ones(3, dtype=torch.float64)
        parameters = (full * 0.8, (full * top_k).long(), full * top_p, full * 0.37)
        with using(isa):
            tokens = kernels.sample(logits, *parameters)
        assert tokens.tolist() == reference.sample(logits, *parameters).tolist()


def test_rows_with_their_own_parameters_and_a_stride_do_not_disturb_each_other():
    wide = torch.randn(6, 1200)
    logits = wide[:, :1000]
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 1.0])
    top_k = torch.tensor([0, 0, 10, 5, 0, 1], dtype=torch.int32)
    top_p, uniform = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.3]), torch.rand(6)
    together = kernels.sample(logits, temperature, top_k, top_p, uniform)
    alone = [
        kernels.sample(logits[i : i + 1], *(t[i : i + 1] for t in (temperature, top_k, top_p, uniform))).item()
        for i in range(6)
    ]
    assert together.tolist() == alone


def test_no_rows_give_no_tokens():
    assert draw(torch.empty(0, 10), 0.5).shape == (0,)


class TestRefusals:
    def call(self, **changes: Tensor) -> Tensor:
        arguments = {
            "logits": torch.zeros(2, 5),
            "temperature": torch.ones(2),
            "top_k": torch.zeros(2, dtype=torch.int64),
            "top_p": torch.ones(2),
            "uniform": torch.zeros(2),
        }
        return kernels.sample(**(arguments | changes))

    @pytest.mark.parametrize(
        "changes",
        [
            {"logits": torch.zeros(2, 5).bfloat16()},
            {"logits": torch.zeros(5, 2).T},
            {"logits": torch.zeros(2, 0)},
            {"logits": torch.zeros(2)},
            {"temperature": torch.ones(3)},
            {"top_k": torch.ones(2)},
            {"top_p": torch.ones(2, dtype=torch.int64)},
            {"uniform": torch.ones(2, 1)},
        ],
    )
    def test_wrong_shapes_strides_and_dtypes(self, changes):
        with pytest.raises(KernelError, match=r"sample takes float32 logits .*; got logits: "):
            self.call(**changes)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -0.1),
            ("temperature", torch.nan),
            ("top_p", -0.1),
            ("top_p", 1.1),
            ("top_p", torch.nan),
            ("uniform", 1.0),
            ("uniform", -0.1),
            ("uniform", torch.nan),
            ("top_k", -1),
        ],
    )
    def test_values_out_of_range(self, name, value):
        dtype = torch.int64 if name == "top_k" else torch.float64
        with pytest.raises(KernelError, match=name):
            self.call(**{name: torch.tensor([0, value], dtype=dtype)})
