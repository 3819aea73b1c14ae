"""A request's structure in the words of the grammar library."""

from itertools import pairwise
from os.path import commonprefix
from typing import Any

import msgspec

from quire.common.params import StructuredOutputsParams

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""keywords whose value maps names to schemas"""
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
"""keywords whose value is a schema or a list of them"""
_ESCAPED = frozenset(r"\.+*?()|[]{}^$#&-~/")


def library_grammar(params: StructuredOutputsParams) -> str:
    """What the library compiles. Raises ValueError or RecursionError for what cannot be one. May take seconds."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:  # one lexeme instead of a rule for each: a hundred times faster for thousands
        return LLMatcher.grammar_from_regex("|".join(map(_literal, params.choice)))
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    schema: Any = {"type": "object"}
    if params.json is not None:
        schema = msgspec.json.decode(params.json) if isinstance(params.json, str) else params.json
    if params.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=options)  # type: ignore[arg-type]


def num_beginnings(params: StructuredOutputsParams) -> int | None:
    """How many beginnings the texts have, where a structure that passed its trial is a list of texts and nothing else:
    as many states has an automaton that reads them, at most. None for anything else."""
    texts: list[bytes] = [choice.encode() for choice in params.choice or ()]
    if params.json is not None:
        schema = msgspec.json.decode(params.json) if isinstance(params.json, str) else params.json
        if isinstance(schema, dict) and schema.keys() == {"enum"}:
            texts = [msgspec.json.encode(value) for value in schema["enum"] if isinstance(value, str)]
            if len(texts) < len(schema["enum"]):
                return None
    if not texts:
        return None
    pairs = pairwise([b"", *sorted(texts)])
    return sum(len(text) - len(commonprefix([before, text])) for before, text in pairs)  # noqa: RUF071


def _literal(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join("\\" + char if char in _ESCAPED else char for char in text)


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it names properties and is silent about others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            closed[keyword] = {name: _closed(item) for name, item in value.items()}
        elif keyword in _SCHEMAS:
            closed[keyword] = _closed(value)
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
