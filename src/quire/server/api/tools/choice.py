"""Checks the tools of a request, and derives the grammar that its `tool_choice` requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.common.errors import InvalidParamsError, nearest_name
from quire.common.params import StructuredOutputsParams
from quire.server.api.chat.protocol import FunctionDefinition, NamedToolChoice, Tool, ToolChoice
from quire.server.api.tools.formats import FUNCTION_NAME, ToolFormat
from quire.server.api.tools.output_parser import ForcedTools

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 192 * 1024
"""Limit on the size of all tools as JSON."""
MAX_SCHEMA_DEPTH = 64
_WHITESPACE = " ?"
"""Allowed between JSON's tokens. Where white space is unlimited, a small model can write spaces without end."""


def check_tools(tools: Sequence[Tool] | None, tool_choice: ToolChoice | None = None) -> None:
    """Raise InvalidParamsError, which names the place, for tools or a choice that cannot be served."""
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise InvalidParamsError(f"tools has {len(tools):,} functions: at most {MAX_TOOLS} are allowed")
    names: dict[str, int] = {}
    for i, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{i}].function"
        _check_function(tool.function, where)
        if names.setdefault(name, i) != i:
            raise InvalidParamsError(f"{where}.name: {name!r} is already the name of tools[{names[name]}]")
    num_bytes = len(msgspec.json.encode(tools))
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidParamsError(f"tools has {num_bytes:,} bytes as JSON: at most {MAX_TOOLS_BYTES:,} are allowed")
    if tool_choice == "required" and not names:
        raise InvalidParamsError("tool_choice='required', but tools is empty: it must contain at least one function")
    if isinstance(tool_choice, NamedToolChoice) and (name := tool_choice.function.name) not in names:
        raise InvalidParamsError(
            f"tool_choice.function.name={name[:64]!r} is not one of the tools{nearest_name(name[:128], names)}"
        )


def forced_tools(tools: Sequence[Tool] | None, tool_choice: ToolChoice | None) -> ForcedTools | None:
    """Return how to read an output with the grammar of `tool_choice_structure`; None if there is no such grammar. The
    arguments must have passed `check_tools`."""
    if not tools or tool_choice in (None, "none", "auto"):
        return None
    return ForcedTools(tool_choice.function.name if isinstance(tool_choice, NamedToolChoice) else None)


def tool_choice_structure(
    tools: Sequence[Tool] | None, tool_choice: ToolChoice | None, parallel: bool = True
) -> StructuredOutputsParams | None:
    """Return the grammar of the calls that the model must make; None if it need not call a tool.

    For a named function the output is its arguments alone. For `required` it is an array of `{"name": ...,
    "parameters": {...}}`, with exactly one item unless `parallel`. The arguments must have passed `check_tools`. Raises
    InvalidParamsError if the schemas together are too large.
    """
    forced = forced_tools(tools, tool_choice)
    if forced is None or tools is None:
        return None
    schemas = _schemas(tools)
    schema = _array(_call_schema(schemas, "parameters"), parallel) if forced.name is None else schemas[forced.name]
    return StructuredOutputsParams(json=schema, whitespace_pattern=_WHITESPACE)


def calls_or_content(
    tools: Sequence[Tool],
    form: StructuredOutputsParams,
    tool_format: ToolFormat,
    special_token_ids: Mapping[str, int],
    parallel: bool,
) -> StructuredOutputsParams:
    """Return the grammar of an output that is either content in this form, which is JSON, or calls as the model writes
    them. Raises InvalidParamsError if the schemas together are too large."""

    def tag(text: str) -> Any:
        token_id = special_token_ids.get(text)
        return text if token_id is None else {"type": "token", "token": token_id}

    schema = _call_schema(_schemas(tools), tool_format.arguments)
    calls = {"type": "json_schema", "json_schema": schema}
    if tool_format.separator is None:
        calls["json_schema"] = _array(schema, parallel)
    space = {"type": "const_string", "value": tool_format.space}
    content = {"type": "sequence", "elements": [space, calls, space]}
    begin = "" if tool_format.begins_bare else tag(tool_format.tag)
    several = {
        "type": "tags_with_separator",
        "tags": [{"begin": begin, "content": content, "end": tag(tool_format.end)}],
        "separator": tool_format.separator or "",
        "at_least_one": True,
        "stop_after_first": tool_format.separator is None or not parallel,
    }
    answer = {"type": "json_schema", "json_schema": {"type": "object"} if form.json is None else form.json}
    return StructuredOutputsParams(structural_tag={"format": {"type": "or", "elements": [answer, several]}})


def _check_function(function: FunctionDefinition, where: str) -> None:
    name = function.name
    if not FUNCTION_NAME.fullmatch(name):
        raise InvalidParamsError(
            f"{where}.name={name[:64]!r}: must be 1 to 128 letters, digits, underscores, dashes or dots (ASCII)"
        )
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise InvalidParamsError(f"{where}.parameters.type={kind!r}: must be 'object': arguments are passed by name")
    _check_depth([function.parameters], where)


def _check_depth(value: Any, where: str) -> None:
    """Check the nesting without recursion, which would fail on the schemas that must be refused."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        children = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for some in children for child in some]
        if not level:
            return
    raise InvalidParamsError(f"{where} is nested too deeply: at most {MAX_SCHEMA_DEPTH} levels are allowed")


def _schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    return {tool.function.name: {**(tool.function.parameters or {}), "type": "object"} for tool in tools}


def _array(items: dict[str, Any], parallel: bool) -> dict[str, Any]:
    limit = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": items["anyOf"]}, "minItems": 1, **limit, "$defs": items["$defs"]}


def _call_schema(schemas: Mapping[str, dict[str, Any]], arguments: str) -> dict[str, Any]:
    """The schema of one call of any function, in which `arguments` is the key of the arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/f{i}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for i, name in enumerate(schemas)
    ]
    return {
        "anyOf": calls,
        "$defs": {f"f{i}": _moved(schema, f"#/$defs/f{i}") for i, schema in enumerate(schemas.values())},
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
