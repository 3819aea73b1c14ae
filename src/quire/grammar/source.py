"""A request's structure in the words of the grammar library."""

from typing import Any

import msgspec

from quire.params import StructuredOutputsParams

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
