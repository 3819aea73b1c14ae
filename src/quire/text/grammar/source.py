"""Conversion of a request's structure to the grammar library's format."""

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import msgspec

from quire.common.params import StructuredOutputsParams
from quire.common.params.structural_tag import read_structural_tag
from quire.text.grammar.schema import adapted_schema, closed
from quire.text.grammar.structural_tag import LarkRules

_JSON_WHITESPACE = r" |\n {0,16}|\n\t{0,4}"
"""Between the tokens of JSON unless the request says otherwise: enough to indent, but not to fill an output with it."""
_ESCAPED = frozenset(r"\.+*?()|[]{}^$#&-~/")
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#).*|/(?:\\.|[^/\\\n])+/|%json\s*(?=\{)')
"""Texts, comments, regular expressions, and what precedes a schema."""
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def library_grammar(params: StructuredOutputsParams) -> str:
    """Return the grammar for the library to compile. Raises ValueError or RecursionError. May take seconds."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:  # one lexeme is a hundred times faster than thousands of rules
        return LLMatcher.grammar_from_regex("|".join(map(_literal, params.choice)))
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or _JSON_WHITESPACE

    def adapted(schema: Any) -> Any:
        schema = closed(schema) if params.disable_additional_properties else schema
        return adapted_schema(schema) | {"x-guidance": options}

    if params.grammar is not None:
        is_gbnf = "::=" in params.grammar
        text = _GBNF_ESCAPE.sub(_character, params.grammar) if is_gbnf else _with_schemas(params.grammar, adapted)
        return grammar_from("grammar", text)
    if params.structural_tag is not None:
        rules = LarkRules(lambda schema: _json_in_lark(adapted(schema)), _regex_in_lark)
        return LLMatcher.grammar_from_lark(rules.grammar(read_structural_tag(params.structural_tag)))
    schema: Any = {"type": "object"}
    if params.json is not None:
        schema = msgspec.json.decode(params.json) if isinstance(params.json, str) else params.json
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(adapted(schema)).decode())


def _character(escape: re.Match[str]) -> str:
    """Return the character of a numeric escape; the library would drop the zeros at its beginning."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
        raise ValueError(f"{escape[0]} is not the number of a Unicode character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _with_schemas(grammar: str, adapted: Callable[[Any], Any]) -> str:
    """Return a grammar in Lark with the schemas after `%json` adapted."""
    parts, end = [], 0
    while found := _LARK_TOKEN.search(grammar, end):
        parts.append(grammar[end : found.start()])
        text, end = found[0], found.end()
        if text.startswith("%"):
            try:
                schema, end = json.JSONDecoder().raw_decode(grammar, end)
            except ValueError as error:
                raise ValueError(f"the schema after %json is not JSON: {error}") from None
            text = _json_in_lark(adapted(schema))
        parts.append(text)
    return "".join([*parts, grammar[end:]])


def num_beginnings(params: StructuredOutputsParams) -> int | None:
    """Return the number of distinct prefixes of a list of texts; None if the structure is not a list of texts.

    An automaton that reads the texts has at most this number of states. The structure must have passed its trial.
    """
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


def _json_in_lark(schema: dict[str, Any]) -> str:
    return f"%json {msgspec.json.encode(schema).decode()}"


def _regex_in_lark(pattern: str) -> str:
    """Return the regular expression between slashes, as Lark has them. The library knows what to escape."""
    from llguidance import LLMatcher

    whole = msgspec.json.decode(LLMatcher.grammar_from_regex(pattern))
    return str(whole["grammars"][0]["lark_grammar"]).removeprefix("start: ")


def _literal(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join("\\" + char if char in _ESCAPED else char for char in text)
