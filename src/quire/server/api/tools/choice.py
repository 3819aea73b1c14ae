"""Checks the tools of a request, and derives the grammar that its `tool_choice` requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.common.errors import InvalidParamsError, nearest_name
from quire.common.params import StructuredOutputsParams
from quire.server.api.tools.formats import FUNCTION_NAME
from quire.server.api.tools.output_parser import ForcedTools

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 192 * 1024
"""Limit on the size of all tools as JSON."""
MAX_SCHEMA_DEPTH = 64
_WHITESPACE = " ?"
"""between JSON's tokens: a small model can write spaces without end where they are free"""
_CHOICES = ("none", "auto", "required")


def check_tools(tools: Any, tool_choice: Any = None) -> None:
    """Raise InvalidParamsError, which names the place, for tools or a choice that cannot be served.

    `tools` is a list of `{"type": "function", "function": {"name", "description", "parameters"}}`, or None;
    `tool_choice` is none, auto, required, `{"type": "function", "function": {"name": ...}}`, or None.
    """
    if tools is not None:
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise InvalidParamsError(f"tools must be a list of functions, not {_kind(tools)}")
        if len(tools) > MAX_TOOLS:
            raise InvalidParamsError(f"tools has {len(tools):,} functions: at most {MAX_TOOLS} are allowed")
        names: dict[str, int] = {}
        for i, tool in enumerate(tools):
            name = _check_tool(tool, f"tools[{i}]")
            if names.setdefault(name, i) != i:
                raise InvalidParamsError(
                    f"tools[{i}].function.name: {name!r} is already the name of tools[{names[name]}]"
                )
        _check_size(tools)
    _check_choice(tool_choice, [tool["function"]["name"] for tool in tools or ()])


def forced_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> ForcedTools | None:
    """How to read an output that `tool_choice_structure` forces; None if it forces nothing. For what was checked."""
    if not tools or tool_choice in (None, "none", "auto"):
        return None
    return ForcedTools(None if tool_choice == "required" else tool_choice["function"]["name"])


def tool_choice_structure(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any, parallel: bool = True
) -> StructuredOutputsParams | None:
    """The grammar of calls that must be made: None where the model is free. For tools and a choice that were checked.

    A named function: its arguments alone. `required`: an array of `{"name": ..., "parameters": {...}}`, of one without
    `parallel`. Raises InvalidParamsError for schemas that are too large together.
    """
    forced = forced_tools(tools, tool_choice)
    if forced is None or tools is None:
        return None
    schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
    if forced.name is not None:
        schema = schemas[forced.name]
    else:
        schema = {
            "type": "array",
            "items": {"anyOf": [_call_schema(name, i) for i, name in enumerate(schemas)]},
            "minItems": 1,
            **({} if parallel else {"maxItems": 1}),
            "$defs": {f"f{i}": _moved(schema, f"#/$defs/f{i}") for i, schema in enumerate(schemas.values())},
        }
    return StructuredOutputsParams(json=schema, whitespace_pattern=_WHITESPACE)


def _check_tool(tool: Any, where: str) -> str:
    """The function's name."""
    function = _field(tool, "function", dict, where)
    if tool.get("type", "function") != "function":
        raise InvalidParamsError(f"{where}.type={tool['type']!r}: only 'function' is supported")
    name: str = _field(function, "name", str, f"{where}.function")
    _check_name(name, f"{where}.function.name")
    for key, kind in (("description", str), ("parameters", dict)):
        if function.get(key) is not None:
            _field(function, key, kind, f"{where}.function")
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object":
        raise InvalidParamsError(
            f"{where}.function.parameters.type={parameters['type']!r}: must be 'object': arguments are passed by name"
        )
    _check_depth(function, f"{where}.function")
    return name


def _field(parent: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(parent, dict):
        raise InvalidParamsError(f"{where} must be an object, not {_kind(parent)}")
    if key not in parent:
        raise InvalidParamsError(f"{where}.{key} is missing")
    if not isinstance(parent[key], kind):
        wanted = "an object" if kind is dict else "a string"
        raise InvalidParamsError(f"{where}.{key} must be {wanted}, not {_kind(parent[key])}")
    return parent[key]


def _check_name(name: str, where: str) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        raise InvalidParamsError(
            f"{where}={name[:64]!r}: must be 1 to 128 letters, digits, underscores, dashes or dots (ASCII)"
        )


def _check_depth(value: Any, where: str) -> None:
    """Check the nesting without recursion, which would fail on the schemas that must be refused."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        children = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for some in children for child in some]
        if not level:
            return
    raise InvalidParamsError(f"{where} is nested too deeply: at most {MAX_SCHEMA_DEPTH} levels are allowed")


def _check_size(tools: Any) -> None:
    try:
        num_bytes = len(msgspec.json.encode(tools))
    except (TypeError, ValueError) as error:  # UnicodeEncodeError too
        raise InvalidParamsError(f"tools cannot be encoded as JSON: {error}") from None
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidParamsError(f"tools has {num_bytes:,} bytes as JSON: at most {MAX_TOOLS_BYTES:,} are allowed")


def _check_choice(choice: Any, names: Sequence[str]) -> None:
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in _CHOICES:
            near = nearest_name(choice, _CHOICES)
            raise InvalidParamsError(
                f"tool_choice={choice[:64]!r}: must be {', '.join(_CHOICES)} or a named function{near}"
            )
        if choice == "required" and not names:
            raise InvalidParamsError(
                "tool_choice='required', but tools is empty: it must contain at least one function"
            )
        return
    if isinstance(choice, dict) and choice.get("type", "function") != "function":
        raise InvalidParamsError(f"tool_choice.type={choice['type']!r}: only 'function' is supported")
    name = _field(_field(choice, "function", dict, "tool_choice"), "name", str, "tool_choice.function")
    if name not in names:
        raise InvalidParamsError(
            f"tool_choice.function.name={name[:64]!r} is not one of the tools{nearest_name(name[:128], names)}"
        )


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**(tool["function"].get("parameters") or {}), "type": "object"}


def _call_schema(name: str, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/f{index}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


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
