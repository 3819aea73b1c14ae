"""Sampling parameters are checked when they are made."""

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.errors import InvalidParamsError
from quire.common.params import SamplingParams

WRONG = {
    "n": [0, 1025, 1.0, True, "2"],
    "best_of": [0, 1025, 1.5, True],
    "temperature": [-0.1, math.nan, math.inf, "hot", True, 1e7, None],
    "top_p": [0, 1.1, math.nan, "x", True],
    "top_k": [-2, 1.5, math.nan, None],
    "min_p": [-0.1, 1.1, math.nan, False],
    "presence_penalty": [-2.1, 2.1, math.inf, "x"],
    "frequency_penalty": [-2.1, 2.1, math.nan, True],
    "repetition_penalty": [0, -1, 0.001, 101, math.inf, None],
    "seed": [2**63, "x", 1.0, True],
    "max_tokens": [0, -1, 1.0, True, math.inf],
    "min_tokens": [-1, 17, 1.5, True, None],
    "stop": ["", ["a", ""], [1], 5, ["x"] * 10_000, "x" * 20_000, ["x" * 20] * 1000, "\ud800", b"x", {"x": 1}],
    "stop_token_ids": [[-1], ["a"], [True], [1.0], 5, "12", [1] * 2000, {1: 2}],
    "include_stop_str_in_output": [1, None, "yes"],
    "ignore_eos": [1, None],
    "logprobs": [-2, 1.5, True, "5"],
    "prompt_logprobs": [-2, 1.5, True, math.nan],
    "logit_bias": [
        {-1: 1},
        {"1": 1},
        {1: 101},
        {1: -100.5},
        {1: math.nan},
        {1: "x"},
        {True: 1},
        [1],
        dict.fromkeys(range(2000), 0),
    ],
    "bad_words": ["word", [""], [1], ["x"] * 2000, ["x" * 20_000], ["\ud800"], 5],
    "allowed_token_ids": [[], [-1], ["a"], [True], 5, "12"],
    "extra_args": [5, [5], "a"],
    "logits_processors": [5, [5], [None], print, [print] * 17],
    "skip_special_tokens": [1, None],
    "spaces_between_special_tokens": [0, "no"],
    "detokenize": [1, None],
    "truncate_prompt_tokens": [0, -2, 1.5, True, "all"],
    "cache_salt": [5, None, "x" * 1025, "\ud800"],
    "structured_outputs": ["a", {"regex": "a"}, 1],
    "output_kind": ["all", None, 1],
    "priority": [2**31 + 1, 0.5, True, None],
    "tenant": [5, None, "x" * 257, "\udfff"],
    "prediction": [5, True, b"x", {}, [-1], ["x"], [1.5], [None], "x" * (2**22 + 1), [0] * (2**22 + 1)],
}


def test_every_field_is_tried_with_wrong_values():
    assert WRONG.keys() == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_and_named(name, value):
    with pytest.raises(InvalidParamsError, match=name) as raised:
        SamplingParams(**{name: value})
    assert len(str(raised.value)) < 300, "however long the value is"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prediction", "x" * (2**22 + 1), "prediction='xxx.*xxx': must be at most 4,194,304 characters long"),
        ("prediction", {}, "prediction={}: must be text, or a list of token ids"),
        ("prediction", [0] * (2**22 + 1), "prediction has 4194305 token ids; at most 4194304 are allowed"),
        ("extra_args", [5], r"extra_args=\[5\]: must be a dict for logits processors, or None"),
    ],
)
def test_an_error_has_the_value_and_what_is_allowed(name, value, message):
    with pytest.raises(InvalidParamsError, match=f"^{message}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1024), ("best_of", 1024), ("temperature", 0), ("temperature", 1e6), ("top_p", 1e-9), ("top_p", 1),
        ("top_k", -1), ("top_k", 2**70), ("min_p", 0), ("min_p", 1), ("presence_penalty", -2),
        ("frequency_penalty", 2), ("repetition_penalty", 0.01), ("repetition_penalty", 100), ("seed", -(2**63) + 1),
        ("max_tokens", None), ("max_tokens", 1), ("max_tokens", 2**40), ("min_tokens", 16),
        ("stop", "x" * 16_384), ("stop", ()),
        ("stop", ["x"] * 1024), ("stop_token_ids", (0,)), ("logprobs", 0), ("logprobs", -1), ("prompt_logprobs", -1),
        ("logit_bias", {5: -100, 6: 100.0}), ("logit_bias", {}), ("bad_words", ["a b"]), ("allowed_token_ids", [0]),
        ("logits_processors", [print] * 16), ("truncate_prompt_tokens", -1), ("truncate_prompt_tokens", 1),
        ("cache_salt", "s" * 1024), ("output_kind", "delta"), ("tenant", "t" * 256), ("priority", -(2**31)),
        ("prediction", ""), ("prediction", []), ("prediction", "x" * 2**22), ("prediction", [2**40]),
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_in_it(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 0, "1 to 1024"),
        ("best_of", 1025, "n=1 to 1024, or None for n"),
        ("temperature", -0.1, "0 for greedy, or a positive number up to 1e6"),
        ("top_p", 0, "more than 0 and at most 1"),
        ("top_k", -2, "-1 or 0 for all tokens, or a count"),
        ("min_p", 1.1, "from 0 to 1"),
        ("repetition_penalty", 0, "from 0.01 to 100; 1 changes nothing"),
        ("seed", 2**63, "a 64-bit integer"),
        ("max_tokens", 0, "at least 1, or None for the number that fits"),
        ("min_tokens", 17, "from 0 to max_tokens=16"),
        ("logprobs", -2, "0 or more, -1 for the whole vocabulary, or None"),
        ("prompt_logprobs", "5", "0 or more, -1 for the whole vocabulary, or None"),
        ("truncate_prompt_tokens", 0, "at least 1, -1 for the number that fits, or None"),
        ("bad_words", 5, "a list of strings"),
        ("stop", 5, "a list of strings"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("allowed_token_ids", 5, "a list of token ids"),
        ("logit_bias", [1], "a dict from token ids to numbers"),
        ("logits_processors", [5], "a list of functions of (token ids, logits)"),
        ("structured_outputs", "json", "StructuredOutputsParams"),
        ("output_kind", "all", "one of cumulative, delta, final_only"),
        ("priority", 0.5, "a 32-bit integer"),
        ("tenant", 5, "a Unicode string of at most 256 characters"),
        ("cache_salt", 5, "a Unicode string of at most 1024 characters"),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_an_error_has_the_field_the_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(InvalidParamsError) as raised:
        SamplingParams(**{name: value})
    assert str(raised.value) == f"{name}={value!r}: must be {allowed}"


def test_the_error_of_a_bias_names_its_token():
    with pytest.raises(InvalidParamsError, match=r"^logit_bias\[7\]=101: must be -100 to 100$"):
        SamplingParams(logit_bias={7: 101})
    with pytest.raises(InvalidParamsError, match=r"^logit_bias=-1: must be a list of token ids"):
        SamplingParams(logit_bias={-1: 0})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": -1, "max_tokens": None}, "^min_tokens=-1: must be 0 or more$"),
        ({"n": 3, "best_of": 2}, "best_of=2: must be n=3 to"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 with temperature=0: greedy"),
        ({"best_of": 2, "temperature": 1e-6}, "greedy"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5: must be from 0 to max_tokens=4"),
        ({"stop": "x", "detokenize": False}, "detokenize=False"),
    ],
)
def test_contradictions_are_refused(params, message):
    with pytest.raises(InvalidParamsError, match=message):
        SamplingParams(**params)


def test_what_only_looks_like_a_contradiction_is_allowed():
    assert SamplingParams(n=2, best_of=2, temperature=0).ranks_samples is False
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6
    assert SamplingParams(stop=[], detokenize=False).stop_strings == ()


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.integers() | st.text(max_size=2) | st.none(), max_size=3),
    st.dictionaries(st.integers() | st.text(max_size=2), st.floats() | st.none(), max_size=2),
), max_size=4))  # fmt: skip
def test_anything_at_all_is_taken_or_refused(fields):
    with contextlib.suppress(InvalidParamsError):
        assert SamplingParams(**fields).num_samples >= 1


def test_only_a_temperature_very_close_to_zero_is_greedy():
    assert SamplingParams(temperature=0.9e-5).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_best_of_is_the_number_of_samples_that_are_generated():
    assert (SamplingParams(n=3).num_samples, SamplingParams(n=3).ranks_samples) == (3, False)
    assert (SamplingParams(n=3, best_of=5).num_samples, SamplingParams(n=3, best_of=5).ranks_samples) == (5, True)


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)


def test_stop_strings_are_a_tuple_however_given():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_a_seed_of_minus_one_is_no_seed_as_in_vllm():
    assert SamplingParams(seed=-1) == SamplingParams()
    params = SamplingParams(seed=7)
    params.seed = -1
    assert params.seed is None
