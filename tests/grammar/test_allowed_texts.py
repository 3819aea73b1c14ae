"""Which texts the grammars of structures allow: never one that the structure forbids."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from quire.common.params import StructuredOutputsParams
from quire.text.grammar.source import library_grammar
from quire.text.grammar.trial import TrialSettings, _ByteTokenizer
from tests.effort import examples


@pytest.fixture(scope="module")
def matcher() -> Callable[..., Any]:
    """Makes the library's matcher of a structure, whose tokens are bytes."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokenizer(TrialSettings(256, {}))))
    return lambda **structure: LLMatcher(tokenizer, library_grammar(StructuredOutputsParams(**structure)))


def allows(matcher: Any, text: str) -> bool:
    assert not matcher.get_error()
    fork = matcher.deep_copy()
    return fork.try_consume_tokens(list(text.encode())) == len(text.encode()) and fork.is_accepting()


BEYOND = 2**53 + 1
"""The first integer that is not a double."""


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1", "0.0000001"], ["0", "0.0", "-0"]),
        ({"exclusiveMinimum": 99, "exclusiveMaximum": 99.5}, ["99.1"], ["99", "99.0"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.01"], ["-1", "-1.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.9", "0.99"], ["0", "1", "1.0"]),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, ["1.5"], ["1", "1.0"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5"], ["0"]),
        ({"exclusiveMaximum": 0.9299999999999999}, ["0.91"], ["0.93", "0.9299999999999999"]),
        ({"type": "integer", "minimum": BEYOND, "maximum": BEYOND + 1}, [str(BEYOND + 1)], [str(BEYOND - 1)]),
        ({"type": "integer", "minimum": 0, "maximum": BEYOND + 2}, ["0", str(BEYOND - 1)], [str(BEYOND + 3)]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53 + 4)], [str(2**53)]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**53 + 4}, ["7"], [str(2**53 + 4)]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**63 - 1}, ["1"], ["0", str(2**63)]),
        ({"minimum": 1e-320}, ["0.5"], ["0", "-1"]),
        ({"enum": [2**53, 2**60, 0.1]}, [str(2**53), str(2**60), "0.1"], [str(2**60 + 1)]),
    ],
    ids=str,
)
def test_bounds_and_values_are_exact(matcher, schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    it = matcher(json={"type": "number"} | schema)
    assert [text for text in right if not allows(it, text)] == []
    assert [text for text in wrong if allows(it, text)] == []


BOUNDS = st.one_of(
    st.integers(-3, 3),
    st.integers(-110, 110),
    st.builds(round, st.floats(-3, 3), st.integers(1, 4)),
    st.floats(-200, 200).filter(lambda number: not 0 < abs(number) < 1e-20),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    lower=st.tuples(st.sampled_from(["minimum", "exclusiveMinimum"]), BOUNDS),
    width=st.one_of(st.sampled_from([0.001, 0.1, 0.5, 1, 2]), st.none()),
    upper=st.tuples(st.sampled_from(["maximum", "exclusiveMaximum"]), BOUNDS),
    multiple=st.one_of(st.none(), st.sampled_from([0.5, 1, 3])),
    is_integer=st.booleans(),
)
def test_any_bounds_are_obeyed(matcher, lower, width, upper, multiple, is_integer) -> None:
    if width is not None:
        upper = (upper[0], lower[1] + width)
    schema = {"type": "integer" if is_integer else "number", **dict([lower, upper])}
    if multiple is not None:
        schema["multipleOf"] = multiple
    it = matcher(json=schema)
    assume(not it.is_error())
    validator = Draft202012Validator(schema)
    steps = (0, 1, 0.5, 0.05, 1e-3, 1e-12)
    numbers = [bound + sign * step for _, bound in (lower, upper) for step in steps for sign in (1, -1)]
    texts = {f"{number:.{places}f}" for number in numbers for places in (0, 1, 3, 13)}
    texts |= {repr(number) for number in numbers} | {repr(math.nextafter(number, 0)) for number in numbers}
    assert [text for text in texts if allows(it, text) and not validator.is_valid(json.loads(text))] == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": BEYOND}, f"the number {BEYOND} is not supported (at /const): it may be rounded to another one"),
        ({"properties": {"a": {"items": {"enum": [1, {"b": [-BEYOND]}]}}}}, "(at /properties/a/items/enum)"),
        ({"enum": [[1e300]]}, "the number 1e+300 is not supported (at /enum)"),
        ({"not": {"const": 2**70}}, f"the number {2**70} is not supported (at /not/const)"),
        ({"anyOf": [{}, {"const": 0.9299999999999999}]}, "(at /anyOf/1/const)"),
        ({"maximum": 10**400}, "numbers beyond the range of 64-bit floats are not supported (at /maximum)"),
        (
            {"minProperties": 2, "additionalProperties": {}},
            "minProperties=2 is not supported: require more properties, or give at most 1,",
        ),
        (
            {"items": {"patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 3}},
            "minProperties=3 is not supported (at /items)",
        ),
        ({"$ref": "#/parts/a", "parts": {"a": {"required": ["a", "a"], "minProperties": 3}}}, "(at /parts/a)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_tag", [False, True])
def test_what_would_be_changed_is_refused(schema: dict[str, Any], said: str, *, is_tag: bool) -> None:
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(ValueError, match=re.escape(said)):
        library_grammar(StructuredOutputsParams(**({"structural_tag": tag} if is_tag else {"json": schema})))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"additionalProperties": {"type": "null"}, "minProperties": 1}, '{"a":null}', "{}"),
        ({"required": ["a"], "minProperties": 2}, '{"a":1,"b":2}', '{"a":1}'),
        ({"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}, '{"a":1,"b":2}', '{"a":1}'),
    ],
    ids=str,
)
def test_one_property_without_a_name_may_be_required(matcher, schema: dict[str, Any], right: str, wrong: str) -> None:
    it = matcher(json={"type": "object"} | schema)
    assert allows(it, right)
    assert not allows(it, wrong)


@pytest.mark.parametrize(
    ("keyword", "others", "obeyed"),
    [
        ("minProperties", False, [1, 2]),
        ("maxProperties", False, [2]),
        ("minProperties", {"type": "null"}, [1]),
        ("maxProperties", {"type": "null"}, []),
    ],
)
def test_numbers_of_properties_are_obeyed_where_the_docs_say_so_and_else_refused(
    matcher, keyword: str, others: Any, obeyed: list[int]
) -> None:
    """Of the names here `a` is required, and `b` and `c` are not."""
    parts = [dict.fromkeys(names) for names in ("", "a", "b", "ab", "ac", "abc", "ad", "abcd")]
    found = []
    for number in range(1, 5):
        schema = {"type": "object", "properties": {name: {"type": "null"} for name in "abc"}, "required": ["a"]}
        schema |= {"additionalProperties": others, keyword: number}
        try:
            it = matcher(json=schema)
        except ValueError:
            continue
        if not it.get_error():
            found.append(number)
            valid = Draft202012Validator(schema)
            assert [part for part in parts if allows(it, json.dumps(part)) != valid.is_valid(part)] == []
    assert found == obeyed


def test_values_and_names_are_not_read_as_keywords(matcher) -> None:
    schema = {
        "default": {"minProperties": 9, "const": BEYOND},
        "examples": [{"const": BEYOND}],
        "properties": {"exclusiveMinimum": {"const": {"exclusiveMinimum": 0, "minProperties": 9}}},
        "required": ["exclusiveMinimum"],
    }
    assert allows(matcher(json=schema), '{"exclusiveMinimum":{"exclusiveMinimum":0,"minProperties":9}}')


def test_names_of_properties_may_be_any_text_or_a_list(matcher) -> None:
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    for any_name in ({"type": "string"}, {}, True):
        it = matcher(json={"properties": {"propertyNames": record | {"propertyNames": any_name}}})
        assert allows(it, '{"propertyNames":{"a":1,"b c":2}}')
        assert not allows(it, '{"propertyNames":{"a":"b"}}')
    for listed in ({"type": "string", "enum": ["a", "b"]}, {"const": "a"}):
        it = matcher(json=record | {"propertyNames": listed, "required": ["a"]})
        assert allows(it, '{"a":1}')
        assert allows(it, '{"a":1,"b":2}') == ("enum" in listed)
        assert [text for text in ('{"a":"x"}', '{"b":1}', '{"a":1,"c":1}', "{}") if allows(it, text)] == []
    assert allows(matcher(json={"type": "object", "propertyNames": {"const": "a"}}), '{"a":[1]}')
    many = {"enum": [str(i) for i in range(2000)]}
    for refused in (
        record | {"propertyNames": {"type": "string", "maxLength": 2}}, record | {"propertyNames": {"enum": [1]}},
        record | {"propertyNames": {"const": "a"}, "properties": {"a": {}}},
        {"propertyNames": many, "additionalProperties": {"propertyNames": many, "additionalProperties": {}}},
    ):  # fmt: skip
        assert 'Unimplemented keys: ["propertyNames"]' in matcher(json=refused).get_error()


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, ['{"a":1}', "{}"], ['{"a":1,"b":2}']),
        (A | {"additionalProperties": True}, ['{"a":1,"b":2}'], ['{"a":"x"}']),
        (A | {"required": ["b"]}, ['{"b":2}'], ["{}"]),
        (A | {"required": ["a"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
        (A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":2}'], ["{}"]),
        (A | {"anyOf": [B]}, ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1}']),
        ({"type": "object", "required": ["a"], "anyOf": [B]}, ['{"b":2,"a":1}'], ['{"b":2}', '{"a":1}']),
        (A | {"oneOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}}, ['{"a":1,"b":2}'], ['{"a":1}']),
        (A | {"$ref": "#/$defs/B", "$defs": {"B": B}}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"allOf": [A, {"$ref": "#/$defs/B"}], "$defs": {"B": B}}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "object", "patternProperties": {"^x": {}}}, ['{"x1":2}', "{}"], ['{"y":1}']),
        ({"anyOf": [A, {"type": "array", "items": A}]}, ['{"a":1}', '[{"a":1}]'], ['{"b":1}', '[{"b":1}]']),
        ({"$ref": "#/parts/A", "parts": {"A": A}}, ['{"a":1}'], ['{"b":1}']),
        ({"properties": {"properties": A, "allOf": {"const": {"allOf": [], "properties": {}}}}},
         ['{"properties":{"a":1}}', '{"allOf":{"allOf":[],"properties":{}}}'], ['{"properties":{"b":1}}', '{"a":1}']),
    ],
    ids=str,
)  # fmt: skip
def test_closed_objects_have_the_properties_that_their_schema_names(matcher, schema, right, wrong) -> None:
    it = matcher(json=schema, disable_additional_properties=True)
    assert [text for text in right if not allows(it, text)] == []
    assert [text for text in wrong if allows(it, text)] == []


@pytest.mark.parametrize("part", [{"properties": 1}, {"properties": {}, "required": 1}, {"patternProperties": []}])
def test_malformed_schemas_are_the_librarys_to_refuse(matcher, part) -> None:
    assert matcher(json=part, disable_additional_properties=True).is_error()


def test_formats_that_the_standard_does_not_define_are_annotations(matcher) -> None:
    it = matcher(json={"type": "string", "format": "starts_with", "pattern": "^ab", "maxLength": 3})
    assert allows(it, '"abc"')
    assert not allows(it, '"bbc"')
    assert allows(matcher(json={"properties": {"format": {"type": "string", "format": "path"}}}), '{"format":"/a"}')
    assert not allows(matcher(json={"type": "string", "format": "date"}), '"a"')
    assert "Unknown format: regex" in matcher(json={"type": "string", "format": "regex"}).get_error()
    assert allows(matcher(json={"type": "array", "uniqueItems": False, "items": {"const": 1}}), "[1,1]")


def test_the_options_of_the_library_are_not_the_clients(matcher) -> None:
    it = matcher(json={"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}})
    assert 'Unimplemented keys: ["uniqueItems"]' in it.get_error()


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[\x00-\x1f]{2}$", ["\n\x01"], ['\n"', "\\\n", '""']),
        (r"^[^ -~]{2}$", ["é\n"], ['é"', "\\\\"]),
        (r'^[^"]*$', ["a\\\n"], ['"', 'a"b']),
        (r"^[^\\]+$", ['a"\n'], ["\\"]),
        (r"^\p{Cc}$", ["\x1f"], ['"', "\\"]),
        (r"^([\x00-\x0f]|[\x10-\x1f])$", ["\x01"], ['"']),
        (r"^(\x00|\u{1}|[\x02-\x1f])$", ["\x01"], ['"', "A"]),
        (r"^[^]\x41[:digit:]]\]\x41A[[:alpha:]&&[^b]]$", ['"]AAa'], ["]]AAa", "1]AAa", '"]AAb']),
        (r"^.\W\D\S$", ['"\\"\\'], ['"a"a']),
    ],
)
def test_classes_of_patterns_are_exact(matcher, pattern: str, right: list[str], wrong: list[str]) -> None:
    it = matcher(json={"type": "string", "pattern": pattern})
    assert [text for text in right if not allows(it, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in wrong if allows(it, json.dumps(text, ensure_ascii=False))] == []
    names = matcher(json={"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False})
    assert [text for text in wrong if allows(names, json.dumps({text: 1}, ensure_ascii=False))] == []


@pytest.mark.parametrize("pattern", ["[a", "[^]", "(a", r"\p{Nothing}"])
def test_patterns_that_are_wrong_are_errors(matcher, pattern: str) -> None:
    assert matcher(json={"type": "string", "pattern": pattern}).is_error()


@pytest.mark.parametrize("text", ["٣", "é"])
def test_digits_and_letters_are_ascii_in_patterns_only(matcher, text: str) -> None:
    assert allows(matcher(regex=r"\d|\w"), text)
    assert not allows(matcher(json={"type": "string", "pattern": r"^(\d|\w)$"}), f'"{text}"')


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (r'"\u00e9ab"', ["éab"], ["\ue9ab"]),
        (r'"caf\u00e9 \U0001F600 x\u0041BC"', ["café 😀 xABC"], []),
        (r'"\u0022\u005c\u000a\u0000"', ['"\\\n\0'], []),
        (r"[\u0041-\u005a\u00e9]", ["A", "Z", "é"], ["a", "u", "0"]),
        (r"[^\u0022\u005d\u005c\u0000-\u001f]", ["a", "["], ['"', "]", "\\", "\x1f"]),
        (r'"\\u00e9"', [r"\u00e9"], ["\\é"]),
        ('"a" # \\u000a "b" \\\n', ["a"], []),
    ],
)
def test_numeric_escapes_of_gbnf(matcher, rule: str, right: list[str], wrong: list[str]) -> None:
    it = matcher(grammar=f"root ::= {rule}")
    assert [text for text in right if not allows(it, text)] == []
    assert [text for text in wrong if allows(it, text)] == []


def test_schemas_in_a_grammar_are_adapted_too(matcher) -> None:
    no_quote = {"type": "string", "pattern": r'^[^"]*$'}
    it = matcher(grammar=f'start: "%json {{" /%json \\{{/ a | "x" // %json {{\n a: %json {json.dumps(no_quote)}\n')
    assert allows(it, '%json {%json {"b"')
    assert not allows(it, r'%json {%json {"\""')
    records = [{"type": "object", "propertyNames": {"type": "string"}}, {"type": "array", "uniqueItems": False}]
    it = matcher(grammar=f"start: %json {json.dumps(records[0])} %json\n{json.dumps(records[1], indent=1)}")
    assert allows(it, '{"a": 1}[1, 1]')
    with pytest.raises(ValueError, match=rf"the number {BEYOND} is not supported \(at /const\)"):
        library_grammar(StructuredOutputsParams(grammar=f'start: %json {{"const": {BEYOND}}}'))
    with pytest.raises(ValueError, match=r"^the schema after %json is not JSON: Expecting property name"):
        library_grammar(StructuredOutputsParams(grammar="start: %json {a}"))


@pytest.mark.parametrize("escape", [r"\ud83d", r"\U00110000"])
def test_a_numeric_escape_that_is_no_character_is_refused(escape: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{escape} is not the number of a Unicode character")):
        library_grammar(StructuredOutputsParams(grammar=f'root ::= "{escape}"'))
