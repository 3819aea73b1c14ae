"""Command-line options of a dataclass of arguments, the texts of their values, and a parser for programs of users."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from quire.common.arguments.vllm_arguments import spelt_out, take_options, whole_number
from quire.common.errors import ConfigError


def add_field_arguments(parser: argparse.ArgumentParser, kind: Any, title: str, *, with_defaults: bool = False) -> None:
    """Add one option for each field of a dataclass of arguments.

    The namespace has only the options given, or with `with_defaults` all of them.
    """
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%")
        if field.default not in (None, ()):
            text += f" (default: {field.default})"
        kinds = set(str(field.type).split(" | ")) - {"None"}
        keywords: dict[str, Any] = {"dest": field.name, "help": text}
        default = [] if field.default == () else field.default  # argparse extends a list
        keywords["default"] = default if with_defaults else argparse.SUPPRESS
        if kinds == {"bool"}:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
        elif kinds == {"tuple[str, ...]"}:
            group.add_argument(flag, nargs="+", action="extend", metavar=field.name.upper(), **keywords)
        else:
            parse = _TYPES[frozenset(kinds)]
            if "None" in str(field.type):
                parse = partial(_or_none, parse)
            group.add_argument(flag, type=parse, metavar=field.name.upper(), **keywords)


def _or_none(parse: Callable[[str], Any], value: str) -> Any:
    try:
        return None if value in ("none", "None") else parse(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid {parse.__name__} value: {value!r}") from error


def _int_or_text(value: str) -> int | str:
    return int(value) if value.removeprefix("-").isdecimal() else value


def _count(value: str) -> int:
    number = whole_number(value)
    if number is None:
        text = f"{value[:80]!r} is not a whole number, as in 16384, 16k (16,000) or 16K (16,384)"
        raise argparse.ArgumentTypeError(text)
    return number


def read_texts(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a dataclass with texts read as on the command line: `none` where an argument may be None, and
    whole numbers, which may have units. Other texts, and values of other types, are returned as they are."""
    read = dict(given)
    for field in dataclasses.fields(kind):
        kinds, value = str(field.type).split(" | "), given.get(field.name)
        if value in ("none", "None") and "None" in kinds:
            read[field.name] = None
        elif isinstance(value, str) and kinds in (["int"], ["int", "None"]) and (n := whole_number(value)) is not None:
            read[field.name] = n
    return read


def tenant_weights(value: str) -> dict[str, float]:
    """Parse `a=2,b=0.5` into a mapping; anything else is a command-line error."""
    weights = {}
    for item in value.split(","):
        name, _, weight = item.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{value!r}: write weights as in a=2,b=0.5") from error
    return weights


def json_object(value: str) -> dict[str, Any]:
    """Parse a JSON object; anything else is a command-line error."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        text = f"""{value[:200]!r} is not JSON, as in '{{"name": "value"}}': {error}"""
        raise argparse.ArgumentTypeError(text) from error
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{value!r} is not a JSON object")
    return parsed


_TYPES: dict[frozenset[str], Any] = {
    frozenset(["int"]): _count,
    frozenset(["float"]): float,
    frozenset(["str"]): str,
    frozenset(["int", "str"]): _int_or_text,
    frozenset(["Mapping[str, float]"]): tenant_weights,
    frozenset(["Mapping[str, Any]"]): json_object,
}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """vLLM's parser for programs that add the engine's options with EngineArgs.add_cli_args.

    It accepts underscores for hyphens, short options, options of single fields, and the options of vLLM that Quire does
    not have: these become attributes of the namespace if they are given, and EngineArgs and LLM say what becomes of
    them.
    """

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does. Raises ConfigError as `spelt_out` does."""
        spelt = spelt_out(sys.argv[1:] if args is None else args, self._option_string_actions)
        given = [self._spelt_as_known(text) for text in spelt]
        others = take_options(given, self._option_string_actions)
        namespace, rest = super().parse_known_args(given, namespace)
        for name, value in others.items():
            setattr(namespace, name, value)
        return namespace, rest

    def _spelt_as_known(self, text: str) -> str:
        option, equals, value = text.partition("=")
        if not option.startswith("--") or option in self._option_string_actions:
            return text
        return option.replace("_", "-") + equals + value


def check_types(args: Any) -> None:
    """Raise ConfigError if a field of a dataclass has a value of the wrong type."""
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        kinds = re.sub(r"Mapping\[str, \w+\]", "dict", str(f.type)).replace("tuple[str, ...]", "texts")
        allowed = kinds.split(" | ")
        kind = "None" if value is None else type(value).__name__
        if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            kind = "texts"
        if kind not in allowed and not (kind == "int" and "float" in allowed):
            raise ConfigError(f"{f.name}={value!r}: must be {' or '.join(allowed)}, not {kind}")
        if kind == "int" and abs(value) >= 2**63:
            raise ConfigError(f"{f.name}={value}: must be a 64-bit integer")
