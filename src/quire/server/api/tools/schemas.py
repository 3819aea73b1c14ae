"""JSON schemas of calls and of their arguments."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.common.errors import InvalidParamsError
from quire.server.api.chat.protocol import Tool
from quire.text.grammar.schema import closed

MAX_REFERRED_BYTES = 256 * 1024

_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def argument_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The schema of each function's arguments, an object, by its name. A function without a schema has no arguments."""
    functions = [tool.function for tool in tools]
    schemas = {one.name: {"properties": {}} if one.parameters is None else one.parameters for one in functions}
    return {name: {**closed(schema), "type": "object"} for name, schema in schemas.items()}


def array_schema(items: dict[str, Any], parallel: bool) -> dict[str, Any]:
    """The schema of an array of calls, of which `call_schema` gives one: exactly one, unless `parallel`."""
    limit = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": items["anyOf"]}, "minItems": 1, **limit, "$defs": items["$defs"]}


def call_schema(schemas: Mapping[str, dict[str, Any]], name_key: str, arguments_key: str) -> dict[str, Any]:
    """The schema of one call of any function, an object with these keys."""
    calls = [
        {
            "type": "object",
            "properties": {name_key: {"const": name}, arguments_key: {"$ref": f"#/$defs/f{i}"}},
            "required": [name_key, arguments_key],
            "additionalProperties": False,
        }
        for i, name in enumerate(schemas)
    ]
    return {
        "anyOf": calls,
        "$defs": {f"f{i}": _moved(schema, f"#/$defs/f{i}") for i, schema in enumerate(schemas.values())},
    }


def properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's properties."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def required(schema: Mapping[str, Any]) -> list[str]:
    """The names of an object's required properties."""
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def property_schemas(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schemas of an object's properties, each as a schema of its own. Raises InvalidParamsError if they are too
    large together, because each one with references contains the schema that they refer to."""
    place = "#/$defs/arguments"
    found = {name: _moved(part, place) if isinstance(part, dict) else {} for name, part in properties(schema).items()}
    referring = [name for name, part in found.items() if b'"$ref"' in msgspec.json.encode(part)]
    whole = _moved(schema, place)
    num_bytes = len(referring) * len(msgspec.json.encode(whole))
    if num_bytes > MAX_REFERRED_BYTES:
        raise InvalidParamsError(
            f"tools: parameters with references need {num_bytes:,} bytes of schemas beside a response_format, at most "
            f"{MAX_REFERRED_BYTES:,} are allowed: give fewer references, or no response_format"
        )
    return found | {name: {**found[name], "$defs": {"arguments": whole}} for name in referring}


def json_types(schema: Any) -> frozenset[str]:
    """The types of JSON that a schema allows, where `number` includes integers. Empty: it may be any."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        return frozenset("number" if name == "integer" else str(name) for name in names)
    if values := listed(schema):
        return frozenset(json_type(json.dumps(value)) for value in values)
    options = schema.get("anyOf") or schema.get("oneOf")
    parts = [json_types(option) for option in options] if isinstance(options, list) else []
    return frozenset().union(*parts) if all(parts) else frozenset()


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists as the only ones, if it does."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) else []


def json_type(text: str) -> str:
    """The type of a value of JSON, by its first character."""
    return _TYPES.get(text[:1], "number")


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself, `#...`, adjusted to its new place."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
