"""The bounds that parameters are checked with, and a beam search's parameters."""

import math

import pytest

from quire.common.errors import InvalidParamsError
from quire.common.params import BeamSearchParams, SamplingParams, StructuredOutputsParams, checks

GOOD = [
    (checks.check_number, 0, 0, 1, "0 to 1"),
    (checks.check_number, 1, 0, 1, "0 to 1"),
    (checks.check_number, 0.5, 0, 1, "0 to 1"),
    (checks.check_int, 3, 3, 5, "3 to 5"),
    (checks.check_int, 5, 3, 5, "3 to 5"),
    (checks.check_int, 10**30, 3, None, "3 or more"),
    (checks.check_flag, True),
    (checks.check_flag, False),
    (checks.check_text, "abc", 3),
    (checks.check_text, "\ud7ff\ue000", 3),
    (checks.check_texts, ["ab", "c"], 2, 3),
    (checks.check_texts, (), 0, 0),
    (checks.check_ids, [0, 5], 2),
]
BAD = [
    (checks.check_number, -0.1, 0, 1, "0 to 1"),
    (checks.check_number, 1.1, 0, 1, "0 to 1"),
    (checks.check_number, math.inf, 0, math.inf, "0 or more"),
    (checks.check_number, -math.inf, -math.inf, 0, "0 or less"),
    (checks.check_number, math.nan, 0, 1, "0 to 1"),
    (checks.check_number, True, 0, 1, "0 to 1"),
    (checks.check_number, "1", 0, 1, "0 to 1"),
    (checks.check_int, 2, 3, 5, "3 to 5"),
    (checks.check_int, 6, 3, 5, "3 to 5"),
    (checks.check_int, 2, 3, None, "3 or more"),
    (checks.check_int, True, 0, 5, "0 to 5"),
    (checks.check_int, 4.0, 3, 5, "3 to 5"),
    (checks.check_flag, 1, "True or False"),
    (checks.check_text, 5, 3, "at most 3 characters"),
    (checks.check_text, "abcd", 3, "at most 3 characters"),
    (checks.check_text, "a\ud800", 3, "Unicode string"),
    (checks.check_text, "\udfff", 3, "Unicode string"),
    (checks.check_texts, "ab", 2, 3, "a list of strings"),
    (checks.check_texts, b"ab", 2, 3, "a list of strings"),
    (checks.check_texts, {"ab"}, 2, 3, "a list of strings"),
    (checks.check_texts, ["a", ""], 2, 3, "=['a', '']: an empty string is not allowed; leave it out"),
    (checks.check_texts, ["abcd"], 2, 3, "at most 3 characters"),
    (checks.check_texts, [5], 2, 3, "at most 3 characters"),
    (checks.check_ids, "12", 2, "a list of token ids"),
    (checks.check_ids, 5, 2, "a list of token ids"),
    (checks.check_ids, [0, -1], 2, "token ids, which are integers from 0"),
    (checks.check_ids, [0, True], 2, "token ids, which are integers from 0"),
    (checks.check_ids, [1.0], 2, "token ids, which are integers from 0"),
]


@pytest.mark.parametrize("case", GOOD, ids=range(len(GOOD)))
def test_what_is_in_its_bounds_is_taken(case):
    check, *arguments = case
    check("field", *arguments)


@pytest.mark.parametrize("case", BAD, ids=range(len(BAD)))
def test_what_is_not_is_refused_with_the_field_the_value_and_the_bounds(case):
    check, value, *bounds = case
    arguments = bounds if check in (checks.check_number, checks.check_int) else bounds[:-1]
    with pytest.raises(InvalidParamsError, match=r"^field=") as raised:
        check("field", value, *arguments)
    assert bounds[-1] in str(raised.value)
    assert isinstance(value, list) or repr(value) in str(raised.value)


def test_the_lowest_number_may_be_left_out():
    checks.check_number("x", 0, 0, 1, "0 to 1", lowest_excluded=False)
    checks.check_number("x", 1e-9, 0, 1, "more than 0", lowest_excluded=True)
    with pytest.raises(InvalidParamsError, match="x=0: must be more than 0"):
        checks.check_number("x", 0, 0, 1, "more than 0", lowest_excluded=True)


def test_long_lists_are_counted():
    with pytest.raises(InvalidParamsError, match="x has 3 token ids; at most 2 are allowed"):
        checks.check_ids("x", [1, 2, 3], 2)
    with pytest.raises(InvalidParamsError, match="x has 3 strings; at most 2 are allowed"):
        checks.check_texts("x", ["a", "b", "c"], 2, 100)
    with pytest.raises(InvalidParamsError, match="x has 7 characters in total; at most 5 are allowed"):
        checks.check_texts("x", ["abc", "defg"], 2, 5)


def test_of_a_list_the_wrong_item_is_named():
    for values, item in (([0, True], "True"), ([0, 3, -1], "-1"), ([0, 1.5], "1.5")):
        with pytest.raises(InvalidParamsError, match=f"^x={item}: must be a list of token ids, which"):
            checks.check_ids("x", values, 5)
    with pytest.raises(InvalidParamsError, match=r"^x=\['a', ''\]: an empty string is not allowed; leave it out$"):
        checks.check_texts("x", ["a", ""], 5, 9)


def test_a_long_value_is_shortened_in_the_message():
    assert len(str(checks.refuse("x", "y" * 10_000, "short"))) < 100


def beams(**changed: object) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 4, "max_tokens": 8} | changed)


@pytest.mark.parametrize(
    ("name", "values"),
    [("beam_width", (1, 256)), ("max_tokens", (1, 10**9)), ("length_penalty", (-10.0, 10.0, 0)), ("n", (1, 4, None)),
     ("early_stopping", (True, False, "never")), ("include_stop_str_in_output", (True, False))],
)  # fmt: skip
def test_the_ends_of_a_beam_search_s_ranges_are_in_them(name, values):
    for value in values:
        assert getattr(beams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beam_width", 0, "1 to 256"), ("beam_width", 257, "1 to 256"), ("beam_width", 2.0, "1 to 256"),
        ("max_tokens", 0, "at least 1"), ("max_tokens", None, "at least 1"),
        ("length_penalty", 10.1, "a number from -10 to 10"),
        ("length_penalty", -10.1, "a number from -10 to 10"), ("early_stopping", "always", "True, False or 'never'"),
        ("early_stopping", None, "True, False or 'never'"), ("n", 0, "1 to beam_width=4"),
        ("n", 5, "1 to beam_width=4"), ("include_stop_str_in_output", 1, "True or False"),
        ("temperature", -1, "0 for greedy"), ("stop_token_ids", [-1], "token ids"), ("tenant", 5, "Unicode"),
        ("priority", 0.5, "integer"),
    ],
)  # fmt: skip
def test_what_a_beam_search_cannot_do_is_refused_by_name(name, value, message):
    with pytest.raises(InvalidParamsError, match=f"^{name}=") as raised:
        beams(**{name: value})
    assert message in str(raised.value)


def test_a_grammar_needs_the_end_of_sequence_token():
    form = StructuredOutputsParams(regex="a")
    assert beams(structured_outputs=form).structured_outputs is form
    assert beams(ignore_eos=True).ignore_eos
    with pytest.raises(InvalidParamsError, match=r"^ignore_eos=True: "):
        beams(structured_outputs=form, ignore_eos=True)


def test_the_engine_sees_a_beam_search_as_that_many_samples():
    form = StructuredOutputsParams(regex="a")
    common = {
        "temperature": 0.5, "max_tokens": 9, "stop_token_ids": [3], "skip_special_tokens": False, "detokenize": False,
        "priority": 7, "tenant": "who",
    }  # fmt: skip
    for more in ({"structured_outputs": form}, {"ignore_eos": True}):
        params = beams(beam_width=3, **common, **more).sampling_params()
        assert params == SamplingParams(n=3, output_kind="final_only", **common, **more)
