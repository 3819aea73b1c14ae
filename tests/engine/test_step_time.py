"""The time of a step as a line over its tokens, whatever the machine does."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.scheduling.step_time import StepTimeModel

FIXED_S, SLOPE_S = 0.02, 0.0005


def observe(model, sizes, fixed_s=FIXED_S, slope_s=SLOPE_S, noise=0.0, seed=0):
    rng = random.Random(seed)
    for size in sizes:
        model.observe(size, (fixed_s + slope_s * size) * (1 + rng.uniform(-noise, noise)))
    return model


def mixed_sizes(count, seed=1):
    rng = random.Random(seed)
    return [rng.choice((1, 4, 8, 64, 256)) for _ in range(count)]


def test_nothing_is_known_before_the_first_step():
    model = StepTimeModel()
    model.observe(0, 1.0)
    assert model.max_tokens(1.0) is None
    assert model.predict(10) == model.seconds_per_token == model.fixed_seconds == 0.0


@given(
    fixed_s=st.floats(0, 1),
    slope_s=st.floats(2e-4, 0.1),  # one that is flatter still counts as a ten thousandth of the mean per token
    sizes=st.lists(st.integers(1, 4096), min_size=2, max_size=8).filter(lambda sizes: max(sizes) >= 2 * min(sizes)),
)
def test_an_exact_line_is_recovered(fixed_s, slope_s, sizes):
    model = observe(StepTimeModel(), sizes, fixed_s, slope_s)
    for size in (1, 100, 10_000):
        assert model.predict(size) == pytest.approx(fixed_s + slope_s * size, rel=0.01)


def test_a_noisy_line_is_recovered():
    model = observe(StepTimeModel(), mixed_sizes(300), noise=0.1)
    assert model.seconds_per_token == pytest.approx(SLOPE_S, rel=0.15)
    assert model.fixed_seconds == pytest.approx(FIXED_S, rel=0.15)


@given(
    steps=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 100)), min_size=1, max_size=80),
    target_s=st.floats(0, 100),
)
def test_any_steps_give_a_rising_line_and_limits_that_keep_to_it(steps, target_s):
    model = StepTimeModel()
    for num_tokens, seconds in steps:
        model.observe(num_tokens, seconds)
    assert model.fixed_seconds >= 0
    limit = model.max_tokens(target_s)
    if limit is None:
        assert all(num_tokens == 0 for num_tokens, _ in steps)
        return
    assert model.seconds_per_token > 0
    assert 0 <= model.predict(1) <= model.predict(10) < model.predict(100_000)
    assert limit >= 0
    assert limit == 0 or model.predict(limit) <= target_s
    most = max(num_tokens for num_tokens, _ in steps)
    assert limit == 2 * most or model.predict(limit + 2) > target_s


def test_steps_of_one_size_are_taken_to_be_proportional():
    model = observe(StepTimeModel(), [8] * 100, noise=0.1)
    assert model.predict(8) == pytest.approx(FIXED_S + 8 * SLOPE_S, rel=0.1)
    assert model.predict(16) == pytest.approx(2 * model.predict(8))
    assert model.fixed_seconds == pytest.approx(0.0, abs=1e-9)


def test_a_slope_once_learned_survives_steps_of_one_size():
    model = observe(StepTimeModel(), mixed_sizes(100))
    observe(model, [8] * 300)
    assert model.seconds_per_token == pytest.approx(SLOPE_S, rel=0.05)


def test_noise_over_nearly_equal_sizes_does_not_become_a_slope():
    for seed in range(20):
        model = observe(StepTimeModel(), [100, 101] * 100, noise=0.2, seed=seed)
        assert model.predict(101) == pytest.approx(FIXED_S + 101 * SLOPE_S, rel=0.2)
        assert 1.3 * model.predict(100) <= model.predict(200) <= 2 * model.predict(100)


@pytest.mark.parametrize("size", [1, 64, 256])
def test_one_stretched_step_does_not_ruin_the_line(size):
    model = observe(StepTimeModel(), mixed_sizes(100), noise=0.05)
    model.observe(size, 10 * (FIXED_S + SLOPE_S * size))
    for probe in (1, 64, 256):
        assert model.predict(probe) == pytest.approx(FIXED_S + SLOPE_S * probe, rel=0.35)


def test_a_slow_first_step_is_outgrown():
    model = StepTimeModel()
    model.observe(64, 1.0)
    observe(model, mixed_sizes(100))
    assert model.predict(256) == pytest.approx(FIXED_S + SLOPE_S * 256, rel=0.15)


@pytest.mark.parametrize("factor", [0.1, 2, 10])
def test_the_line_follows_a_machine_that_changes(factor):
    model = observe(StepTimeModel(), mixed_sizes(200))
    observe(model, mixed_sizes(300, seed=2), factor * FIXED_S, factor * SLOPE_S)
    assert model.seconds_per_token == pytest.approx(factor * SLOPE_S, rel=0.1)
    assert model.fixed_seconds == pytest.approx(factor * FIXED_S, rel=0.1)


def test_the_limit_is_the_most_that_fits():
    model = observe(StepTimeModel(), mixed_sizes(100))
    assert model.max_tokens(0.07) in (99, 100)
    assert model.max_tokens(FIXED_S / 2) == 0
    for num_tokens in range(1, 400):
        target_s = model.predict(num_tokens)
        limit = model.max_tokens(target_s)
        assert num_tokens - 1 <= limit <= num_tokens
        assert model.predict(limit) <= target_s
        assert model.max_tokens(math.nextafter(target_s, 0.0)) == num_tokens - 1
    assert model.max_tokens(float("inf")) == 2 * 256


def test_small_steps_that_cost_the_same_do_not_promise_that_large_ones_do():
    model = StepTimeModel()
    for num_tokens in (1, 8, 16, 4) * 5:
        model.observe(num_tokens, 0.02)
    assert model.max_tokens(0.06) == 32
    model.observe(32, 0.02)
    assert model.max_tokens(0.06) == 64


def plain(steps, decay):
    """The slope and the means as they are defined, from all steps at once."""
    weights = [decay ** (len(steps) - 1 - i) for i in range(len(steps))]
    total = sum(weights)
    mean_tokens = sum(w * t for w, (t, _) in zip(weights, steps, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, steps, strict=True)) / total
    rows = [(w, t - mean_tokens, s - mean_s) for w, (t, s) in zip(weights, steps, strict=True)]
    tokens_tokens, tokens_s, s_s = (
        sum(w * (t * t, t * s, s * s)[kind] for w, t, s in rows) for kind in range(3)
    )  # fmt: skip
    prior = mean_s / mean_tokens
    noise = max(0.0, s_s - tokens_s**2 / tokens_tokens) / total
    pull = noise / prior**2
    slope = min(max((tokens_s + pull * prior) / (tokens_tokens + pull), 1e-4 * prior), prior)
    return slope, max(0.0, mean_s - slope * mean_tokens)


@pytest.mark.parametrize("decay", [0.98, 0.7])
def test_the_line_is_the_one_that_is_defined(decay):
    for seed in range(20):
        rng = random.Random(seed)
        model, steps = StepTimeModel(decay), []
        for _ in range(30):
            tokens = rng.randint(10, 40)
            steps.append((tokens, (0.3 + 0.1 * tokens) * rng.uniform(0.8, 1.2)))
            model.observe(*steps[-1])
            if len(steps) > 1:
                slope, fixed_s = plain(steps, decay)
                assert model.seconds_per_token == pytest.approx(slope, rel=1e-6)
                assert model.fixed_seconds == pytest.approx(fixed_s, rel=1e-6, abs=1e-9)
                assert model.predict(7) == pytest.approx(fixed_s + 7 * slope, rel=1e-6)


@pytest.mark.parametrize(("num_before", "is_clipped"), [(4, False), (7, False), (8, True), (9, True)])
def test_a_step_counts_as_at_most_three_times_its_prediction_once_there_were_eight(num_before, is_clipped):
    long, clipped = (observe(StepTimeModel(), [10] * num_before, fixed_s=0.0, slope_s=0.1) for _ in range(2))
    long.observe(10, 10.0)
    clipped.observe(10, 3.0)
    assert (long.predict(10) == pytest.approx(clipped.predict(10), rel=1e-9)) is is_clipped


def test_a_step_that_the_clock_does_not_see_took_a_nanosecond():
    models = [StepTimeModel(), StepTimeModel()]
    models[0].observe(5, 0.0)
    models[1].observe(5, 1e-9)
    assert models[0].predict(5) == models[1].predict(5) > 0


def test_steps_without_tokens_are_left_out_and_those_of_one_token_are_not():
    model = StepTimeModel()
    for num_tokens in (-1, 0):
        model.observe(num_tokens, 9.0)
    assert model.max_tokens(1.0) is None
    model.observe(1, 2.0)
    assert (model.predict(1), model.max_tokens(2.0)) == (2.0, 1)


def test_the_limit_may_be_met_exactly():
    model = StepTimeModel()
    model.observe(4, 1.0)
    assert [model.max_tokens(target_s) for target_s in (0.0, 0.24, 0.25, 1.0, 1.2, 2.0, 9.0)] == [0, 0, 1, 4, 4, 8, 8]


def test_no_limit_is_beyond_what_a_step_could_hold():
    model = StepTimeModel()
    model.observe(2**40, 1.0)
    assert model.max_tokens(math.inf) == 2**31
