"""Sampling parameters are checked when they are made."""

import math

import pytest

from quire.errors import InvalidParamsError
from quire.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", "x"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("output_kind", "all"),
    ],
)
def test_a_wrong_value_is_refused_and_named(name, value):
    with pytest.raises(InvalidParamsError, match=name):
        SamplingParams(**{name: value})


def test_stop_strings_need_text():
    with pytest.raises(InvalidParamsError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)


def test_stop_strings_are_a_tuple_however_given():
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_a_misspelt_parameter_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)
