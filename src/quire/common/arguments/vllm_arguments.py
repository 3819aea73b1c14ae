"""What becomes of vLLM's arguments that Quire does not have: vllm_arguments.toml lists them."""

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal

from quire.common.errors import ConfigError, QuireError, nearest_name
from quire.common.log import log_early

_FILE = Path(__file__).with_suffix(".toml")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_FIELDS = 16
"""Of an option of single fields, within one another. No configuration nests that deep, and JSON is read recursively."""
Kind = Literal["engine", "server", "sampling", "structured", "beam", "pooling"]


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """An argument of vLLM that Quire does not have under this name."""

    verdict: Literal["ignored", "refused", "renamed"]
    reason: str
    allowed: tuple[Any, ...] = ()
    """Values besides empty ones that ask for nothing, where the verdict is `refused`."""
    to: str = ""
    """Quire's name, where the verdict is `renamed`."""

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether Quire does what this value asks for, or it asks for nothing."""
        return self.verdict == "ignored" or not value or value in self.allowed


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def flags() -> list[str]:
    """Those that have no value on the command line."""
    found: list[str] = _tables()["flags"]
    return found


@cache
def vllm_arguments(kind: Kind) -> dict[str, VllmArgument]:
    """All of one kind, by name."""
    found = {}
    for group in _tables().get(kind, ()):
        allowed = group.get("allowed", {})
        for name in (*group.get("arguments", ()), *allowed):
            values = tuple(allowed.get(name, ()))
            found[name] = VllmArgument(group["verdict"], group.get("reason", ""), values, group.get("to", ""))
    return found


def translate(
    kind: Kind, given: Mapping[str, Any], own: Collection[str], error: type[QuireError], what: str = "argument"
) -> dict[str, Any]:
    """Return the arguments under Quire's names, `own`, without those of vLLM that make no difference here.

    Raises `error` for a name that neither Quire nor vLLM has, with the nearest that Quire has, and for a value that
    asks for something that Quire does not have.
    """
    known, kept, dropped = vllm_arguments(kind), {}, []
    for name, value in given.items():
        argument = known.get(name)
        if name in own:
            kept[name] = value
        elif argument is None:
            raise error(f"unknown {what} {name!r}{nearest_name(name, own)} (allowed: {', '.join(own)})")
        elif argument.verdict == "renamed":
            if value is not None:
                kept[argument.to] = value
        elif not argument.asks_for_nothing(value):
            raise error(f"{name}={str(value)[:80]!r} is not supported: {argument.reason}")
        else:
            dropped.append(f"{name} ({argument.reason})")
    if dropped and kind in ("engine", "server"):
        log_early(f"without effect here: {'; '.join(dropped)}")
    return kept


def parsers(name: str) -> dict[str, list[str]]:
    """vLLM's parsers, of a `tool_parser` or `reasoning_parser`, by Quire's name of the format; `other` has none."""
    found: dict[str, list[str]] = _tables()["parsers"][name]
    return found


def formats(name: str) -> tuple[str, ...]:
    """Quire's names of the formats of a `tool_parser` or `reasoning_parser`."""
    return tuple(ours for ours in parsers(name) if ours != "other")


def own_format(name: str, value: str) -> str:
    """Return Quire's name of the format that a parser of vLLM reads, and any other value as it is.

    Raises ConfigError for a parser of vLLM whose format Quire does not read.
    """
    known, own = parsers(name), formats(name)
    found = next((ours for ours, theirs in known.items() if value in theirs), value)
    if found == "other":
        same = [theirs for ours in own for theirs in known[ours]]
        raise ConfigError(f"{name}={value!r}: this format is not supported (available: {', '.join([*own, *same])})")
    return found


def whole_number(text: str) -> int | None:
    """Read an integer, which may have a unit as in vLLM (`16k` is 16,000, `16K` 16,384); None if it is not one."""
    found = re.fullmatch(r"\s*([+-]?\d{1,40}(?:\.\d{1,40})?)([kmgtKMGT]?)\s*", text)
    number = Fraction(found[1]) * _UNITS.get(found[2], 1) if found else Fraction(1, 2)
    return int(number) if number.denominator == 1 else None


def spelt_out(arguments: Iterable[str], known: Collection[str]) -> list[str]:
    """Return a command line with vLLM's short options (`-tp 2`, `-O3`) spelt out, and options of single fields, such as
    `--speculative-config.method ngram`, joined to one JSON object.

    Options that are `known` remain as they are. Raises ConfigError for too many fields within one another.
    """
    short: dict[str, str] = _tables()["short"]
    names = {*short.values(), *vllm_arguments("engine"), *vllm_arguments("server")}
    found, objects = list[str](), dict[str, dict[str, Any]]()
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            rest = iter([argument, *rest])
            break
        option, equals, value = argument.partition("=")
        if re.fullmatch(r"-O\w+", option) and option not in known:
            option, equals, value = "-O", "=", option[2:]
        option, *fields = option.split(".")
        name = short.get(option, option.removeprefix("--").replace("-", "_"))
        full = f"--{name.replace('_', '-')}"
        is_option = option.startswith("--") or (option in short and option not in known)
        if fields and is_option and (full in known or name in names):
            if len(fields) > _MAX_FIELDS:
                raise ConfigError(f"{argument[:80]}: {len(fields):,} fields within one another; at most {_MAX_FIELDS}")
            inner = objects.setdefault(full, {})
            *path, last = (field.replace("-", "_") for field in fields)
            for field in path:
                inner[field] = inner = inner[field] if isinstance(inner.get(field), dict) else {}
            text = value if equals else next(rest, "")
            inner[last.removesuffix("+")] = text.split(",") if last.endswith("+") else _parsed(text)
        else:
            found.append(argument if option not in short or not is_option else full + equals + value)
    return [*found, *(f"{option}={json.dumps(value)}" for option, value in objects.items()), *rest]


def take_options(arguments: list[str], known: Collection[str]) -> dict[str, Any]:
    """Remove the options that only vLLM has from a command line, and return their values by name.

    Options that are `known` remain. A value is parsed as JSON where it is JSON.
    """
    if all(argument.partition("=")[0] in known for argument in arguments if argument.startswith("--")):
        return {}
    names = {*vllm_arguments("engine"), *vllm_arguments("server")}
    found: dict[str, Any] = {}
    place = 0
    while place < len(arguments):
        option, equals, value = arguments[place].partition("=")
        is_off = option.startswith("--no-") and option not in known
        name = option.removeprefix("--no-" if is_off else "--").replace("-", "_")
        if not option.startswith("--") or option in known or name not in names:
            place += 1
            continue
        del arguments[place]
        if equals:
            found[name] = _parsed(value)
        elif name in flags() or place == len(arguments):
            found[name] = not is_off
        else:
            found[name] = _parsed(arguments.pop(place))
    return found


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None if value == "None" else value
