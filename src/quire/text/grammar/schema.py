"""Adaptation of JSON schemas to the grammar library, which otherwise allows some outputs that a schema forbids."""

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
_LITERALS = ("const", "enum")
_VALUES = (*_LITERALS, "default", "examples")
"""Keywords whose value is no schema. Values of unknown keywords may contain schemas, to which a `$ref` can refer."""
_NEUTRAL: dict[str, tuple[object, ...]] = {"propertyNames": ({}, True, {"type": "string"}), "uniqueItems": (False,)}
"""Keywords that the library does not know, with the values that say nothing. Zod writes such names for every record."""
_FORMATS = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""The formats that the standard defines. Others, such as Zod's `cuid` and Pydantic's `path`, are annotations."""
_MAX_NAMED_CHARS = 2**18
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
"""Keywords of inclusive and exclusive bounds, and the sign of the direction inwards."""
_SMALLEST = 1e-60
"""Stands for the number next to an exclusive bound of 0. The library cannot read a number with twice as many zeros."""
_PART_OF_PATTERN = re.compile(
    r"(\\(?:[pPxuU]\{[^}]*\}|[pP].|x..|u.{4}|U.{8})|\0)"  # outside of brackets, a class or a character by its number
    r"|\\.|\[\^?\]?|.",
    re.DOTALL,
)

_NAMED = frozenset(("properties", "patternProperties"))
_COMBINING = frozenset(("anyOf", "oneOf", "$ref"))
"""Keywords whose schemas describe the same object as the keywords beside them. `allOf` is another one."""
_MAY_NAME = re.compile(r"'(properties|\$ref)'")

_Place: TypeAlias = "tuple[_Place, object] | None"


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that it names, and others only where it mentions them.

    Programs that write schemas mostly mean that, and do not expect the names that a model makes up. A schema with
    several parts that describe one object, and may name different properties, is returned unchanged. Raises
    RecursionError.
    """
    parts: list[dict[str, Any]] = []

    def keep(part: dict[str, Any], _: _Place) -> dict[str, Any]:
        parts.append(part)
        return part

    copy = _rebuilt(schema, keep)
    for part in parts:
        more = {keyword: part[keyword] for keyword in part.keys() & _COMBINING}
        if "allOf" in part or (part.keys() & {*_NAMED, "required"} and _MAY_NAME.search(str(more))):
            return schema
        if part.keys() & _NAMED and not more and "minProperties" not in part and _names_required(part):
            part.setdefault("additionalProperties", False)
    return copy


def adapted_schema(schema: Any) -> Any:
    """Return a schema from which the library makes a grammar without invalid outputs.

    Raises ValueError, with the place in the schema, for what the library cannot do, and RecursionError.
    """
    return _rebuilt(schema, _adapted)


def _rebuilt(schema: Any, own: Callable[[dict[str, Any], _Place], dict[str, Any]], place: _Place = None) -> Any:
    """Return a copy of a schema, with what `own` returns for each schema in it and its place, inner ones first."""
    if isinstance(schema, list):
        return [_rebuilt(item, own, (place, i)) for i, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        here = (place, keyword)
        if keyword in _MAPS and isinstance(value, dict):
            copy[keyword] = {name: _rebuilt(item, own, (here, name)) for name, item in value.items()}
        else:
            copy[keyword] = value if keyword in _VALUES else _rebuilt(value, own, here)
    return own(copy, place)


def _adapted(schema: dict[str, Any], place: _Place) -> dict[str, Any]:
    adapted: dict[str, Any] = {}
    for keyword, value in schema.items():
        if value in _NEUTRAL.get(keyword, ()) or (keyword == "format" and value not in _FORMATS):
            continue
        if keyword in _LITERALS:
            _check_numbers(value, (place, keyword))
        if keyword == "pattern" and isinstance(value, str):
            value = _without_nul(value)
        elif keyword == "patternProperties" and isinstance(value, dict):
            value = {_without_nul(pattern): item for pattern, item in value.items()}
        adapted[keyword] = value
    adapted = _with_names(adapted)
    _check_num_properties(adapted, place)
    return adapted | _inner_bounds(adapted, place)


def _names_required(schema: dict[str, Any]) -> bool:
    """Return whether the properties that a schema requires are among those that it names."""
    names, required = schema.get("properties", {}), schema.get("required", [])
    is_well_formed = isinstance(names, dict) and isinstance(required, list)
    return is_well_formed and all(isinstance(name, str) and name in names for name in required)


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that lists the names of all properties in `propertyNames`, which the library does not know, has them in
    `properties` instead; one that does not, or would become large, is returned unchanged."""
    names, value = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or not names.keys() <= {"type", "enum", "const"} or "properties" in schema:
        return schema
    listed = names.get("enum", [names.get("const")])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed) or value is False:
        return schema
    if len(listed) * len(str(value)) > _MAX_NAMED_CHARS or "patternProperties" in schema:
        return schema
    named = {"properties": dict.fromkeys(listed, {} if value is True else value), "additionalProperties": False}
    return {keyword: item for keyword, item in schema.items() if keyword != "propertyNames"} | named


def _without_nul(pattern: str) -> str:
    """Return a regular expression whose classes do not contain U+0000.

    In JSON, the library would allow quotes and backslashes wherever all control characters match.
    """
    parts, depth = [], 0
    for part in _PART_OF_PATTERN.finditer(pattern):
        is_start, is_end = part[0][0] == "[", part[0] == "]" and depth > 0
        is_class = depth == 0 and part[1] is not None
        parts.append("[" * (is_class or (is_start and depth == 0)) + part[0])
        depth += is_start - is_end
        if is_class or (is_end and depth == 0):
            parts.append(r"&&[^\x00]]")
    return "".join(parts) if depth == 0 else pattern


def _check_numbers(value: Any, place: _Place) -> None:
    """Refuse numbers that the library would change. It writes those above 64 bits with zeros as their last digits."""
    values = [value]
    while values:
        item = values.pop()
        if isinstance(item, (list, dict)):
            values += item.values() if isinstance(item, dict) else item
        elif isinstance(item, (int, float)) and (abs(item) >= 2**63 or _as_read(item, place) != item):
            raise ValueError(f"the number {item} is not supported{_at(place)}: it may be rounded to another one")


def _check_num_properties(schema: dict[str, Any], place: _Place) -> None:
    """Refuse a number of properties that the library could reach by generating the same name twice."""
    wanted, required = schema.get("minProperties"), schema.get("required")
    num_named = len(set(map(str, required))) if isinstance(required, list) else 0
    has_unnamed = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if has_unnamed and isinstance(wanted, (int, float)) and wanted > num_named + 1:
        raise ValueError(
            f"minProperties={wanted} is not supported{_at(place)}: require more properties, or give at most "
            f"{num_named + 1}, which is 1 more than the number of required ones"
        )


def _inner_bounds(schema: dict[str, Any], place: _Place) -> dict[str, float]:
    """Return those bounds of numbers that the library does not obey, moved inwards to the next double that it obeys."""
    moved = {}
    for plain, exclusive, sign in _BOUNDS:
        for keyword in (plain, exclusive):
            bound = schema.get(keyword)
            if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                continue
            is_exclusive = keyword == exclusive or schema.get(exclusive) is True  # as in old drafts
            inner: float = bound
            while not _is_obeyed(_as_read(inner, (place, keyword)), bound, sign, is_exclusive):
                is_small = abs(inner) < _SMALLEST
                moved[keyword] = inner = sign * _SMALLEST if is_small else math.nextafter(inner, sign * math.inf)
    return moved


def _is_obeyed(read: float, bound: float, sign: int, is_exclusive: bool) -> bool:
    """Return whether the library obeys a bound which it reads as `read`.

    It allows an exclusive integer if the other bound is farther from 0 but not as far as the next integer. There are no
    doubles between integers from 2**52 on; from 2**53 on, the library's arithmetic on bounds of integers is not exact.
    """
    if read != bound:
        return read * sign > bound * sign
    return not is_exclusive or not read.is_integer() or (abs(read) < 2**53 and (read * sign < 0 or abs(read) >= 2**52))


def _as_read(number: float, place: _Place) -> float:
    """Return the number as the library reads it: as the quotient or product of two doubles if it has an exponent."""
    try:
        read = float(number)
    except OverflowError:
        read = math.inf
    if not math.isfinite(read):
        raise ValueError(f"numbers beyond the range of 64-bit floats are not supported{_at(place)}")
    if isinstance(number, int):
        return read
    mantissa, _, exponent = repr(read).partition("e")
    whole, _, fraction = mantissa.partition(".")
    shift = int(exponent or 0) - len(fraction)
    significand, power = float(whole + fraction), float(f"1e{abs(shift)}")
    return significand * power if shift > 0 else significand / power


def _at(place: _Place) -> str:
    """Return the place as a JSON pointer."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(f"/{name}")
    return f" (at {''.join(reversed(names))})" if names else ""
