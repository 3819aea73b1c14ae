"""The structures that an output may be asked to have: the largest that are taken, and what is refused by name."""

import pytest

from quire.common.errors import InvalidParamsError
from quire.common.params import StructuredOutputsParams

LARK = "start: "
GBNF = "root ::= "


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", {"type": "object"}),
        ("json", '{"type": "object"}'),
        ("json", {}),
        ("regex", "a"),
        ("choice", ["a"]),
        ("grammar", "start: A"),
        ("json_object", True),
    ],
)
def test_each_structure_is_taken_and_named(name, value):
    params = StructuredOutputsParams(**{name: value})
    assert params.structure == name
    assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("name", "value", "one_more", "limit"),
    [
        ("regex", "a" * 65_536, "a" * 65_537, "65,536"),
        ("regex", "\u00fc" * 32_768, "\u00fc" * 32_769, "65,536"),
        ("grammar", GBNF.ljust(16_384, "a"), GBNF.ljust(16_385, "a"), "16,384"),
        ("grammar", LARK.ljust(65_536, "a"), LARK.ljust(65_537, "a"), "65,536"),
        ("choice", ["a"] * 10_000, ["a"] * 10_001, "10,000"),
        ("choice", ["a" * (262_144 - 4)], ["a" * (262_144 - 3)], "262,144"),
        ("json", '{"a": 1}'.ljust(262_144), '{"a": 1}'.ljust(262_145), "262,144"),
        ("json", {"a": "x" * (262_144 - 8)}, {"a": "x" * (262_144 - 7)}, "262,144"),
    ],
)
def test_the_largest_structures_are_taken_and_larger_ones_refused(name, value, one_more, limit):
    assert StructuredOutputsParams(**{name: value}).structure == name
    with pytest.raises(InvalidParamsError, match=f"^{name} has .*at most {limit} are allowed"):
        StructuredOutputsParams(**{name: one_more})


def test_a_structural_tag_is_read_when_it_is_given():
    with pytest.raises(InvalidParamsError, match="structural_tag"):
        StructuredOutputsParams(structural_tag='{"type": "unknown"}')


@pytest.mark.parametrize("structure", [{"json": {}}, {"json_object": True}])
@pytest.mark.parametrize(
    "option",
    [{"disable_any_whitespace": True}, {"disable_additional_properties": True}, {"whitespace_pattern": " " * 256},
     {"disable_any_whitespace": False, "whitespace_pattern": " "}],
)  # fmt: skip
def test_options_go_with_json(structure, option):
    params = StructuredOutputsParams(**structure, **option)
    assert all(getattr(params, name) == value for name, value in option.items())


@pytest.mark.parametrize("structure", [{"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: A"}])
@pytest.mark.parametrize(
    "option",
    [{"disable_any_whitespace": True}, {"disable_additional_properties": True}, {"whitespace_pattern": " "}],
)
def test_options_go_with_nothing_else(structure, option):
    (name,) = structure
    with pytest.raises(
        InvalidParamsError,
        match=f"^{next(iter(option))} can be used with json or json_object or structural_tag, not with {name}$",
    ):
        StructuredOutputsParams(**structure, **option)
    assert StructuredOutputsParams(**structure, disable_any_whitespace=False).structure == name


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [("disable_any_whitespace", None, "bool"), ("disable_any_whitespace", 1, "bool"),
     ("disable_additional_properties", "no", "bool"), ("whitespace_pattern", "", "str"),
     ("whitespace_pattern", 5, "str")],
)  # fmt: skip
def test_an_option_of_the_wrong_kind_is_refused(option, value, kind):
    with pytest.raises(InvalidParamsError) as raised:
        StructuredOutputsParams(json={}, **{option: value})
    assert str(raised.value) == f"{option}={value!r}: must be a {kind}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs has no structure: give exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "grammar": "b"}, "structured_outputs has regex and grammar: give exactly one of"),
        ({"json": 5}, "json=5: must be a non-empty string or a dict"),
        ({"json": ""}, "json='': must be a non-empty string or a dict"),
        ({"choice": []}, "choice=[]: must be a non-empty list"),
        ({"choice": ["a", ""]}, "choice must be a list of non-empty strings"),
        ({"choice": ["a", 5]}, "choice must be a list of non-empty strings"),
        ({"json": "[]"}, "json must be a JSON schema, an object, not list"),
        ({"json": "5"}, "json must be a JSON schema, an object, not int"),
        ({"json": "{"}, "json is not JSON: "),
        ({"json": {"a": object()}}, "json cannot be written as JSON: "),
        ({"regex": "\ud800"}, "regex has surrogates, which are not valid Unicode text"),
        ({"json_object": True, "whitespace_pattern": "\u00fc" * 129}, "whitespace_pattern has 258 bytes: at most 256"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "give disable_any_whitespace or"),
    ],
)
def test_what_is_wrong_is_said_by_name(fields, message):
    with pytest.raises(InvalidParamsError) as raised:
        StructuredOutputsParams(**fields)
    assert str(raised.value).startswith(message)
