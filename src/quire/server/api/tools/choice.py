"""Checks the tools of a request, and derives the grammar that its `tool_choice` requires."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.common.errors import InvalidParamsError, nearest_name
from quire.common.params import StructuredOutputsParams
from quire.server.api.chat.protocol import FunctionDefinition, Tool, ToolChoice, ToolSelection
from quire.server.api.tools.call_reader import FUNCTION_NAME
from quire.server.api.tools.call_styles import Part, sequence
from quire.server.api.tools.formats import ToolFormat
from quire.server.api.tools.output_parser import ForcedTools
from quire.server.api.tools.schemas import argument_schemas, array_schema, call_schema
from quire.text.grammar.schema import closed

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 192 * 1024
"""Limit on the size of all tools as JSON."""
MAX_SCHEMA_DEPTH = 64
_NESTED = ("elements", "tags", "content")
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
    if tool_choice in ("required", "any") and not names:
        raise InvalidParamsError(
            f"tool_choice={tool_choice!r}, but tools is empty: it must contain at least one function"
        )
    if isinstance(tool_choice, ToolSelection) and (wrong := [n for n in tool_choice.names if n not in names]):
        where = "allowed_tools" if tool_choice.function is None else "function.name"
        near = nearest_name(wrong[0][:128], names)
        raise InvalidParamsError(f"tool_choice.{where}={wrong[0][:64]!r} is not one of the tools{near}")


def allowed_tools(
    tools: Sequence[Tool] | None, tool_choice: ToolChoice | None
) -> tuple[Sequence[Tool] | None, ToolChoice | None]:
    """Return the tools that the model may call, and the choice among them. The arguments must have passed
    `check_tools`."""
    if not isinstance(tool_choice, ToolSelection) or tool_choice.allowed_tools is None or tools is None:
        return tools, tool_choice
    return [tool for tool in tools if tool.function.name in tool_choice.names], tool_choice.allowed_tools.mode


def forced_tools(tools: Sequence[Tool] | None, tool_choice: ToolChoice | None) -> ForcedTools | None:
    """Return how to read an output with the grammar of `tool_choice_structure`; None if there is no such grammar. The
    arguments are those that `allowed_tools` returns."""
    if not tools or tool_choice in (None, "none", "auto"):
        return None
    return ForcedTools(tool_choice.names[0] if isinstance(tool_choice, ToolSelection) else None)


def tool_choice_structure(
    tools: Sequence[Tool] | None, tool_choice: ToolChoice | None, parallel: bool = True
) -> StructuredOutputsParams | None:
    """Return the grammar of the calls that the model must make; None if it need not call a tool.

    For a named function the output is its arguments alone. For `required` it is an array of `{"name": ...,
    "parameters": {...}}`, with exactly one item unless `parallel`. The arguments are as `allowed_tools` returns them.
    Raises InvalidParamsError if the schemas together are too large.
    """
    forced = forced_tools(tools, tool_choice)
    if forced is None or tools is None:
        return None
    schemas = argument_schemas(tools)
    calls = array_schema(call_schema(schemas, "name", "parameters"), parallel)
    schema = calls if forced.name is None else schemas[forced.name]
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

    written = tool_format.written(argument_schemas(tools), parallel)
    calls = {
        "type": "tags_with_separator",
        "tags": [{"begin": "", "content": sequence(*call), "end": ""} for call in written.calls],
        "separator": written.between or "",
        "at_least_one": True,
        "stop_after_first": written.between is None or not parallel,
    }
    answer = {"type": "json_schema", "json_schema": {"type": "object"} if form.json is None else closed(form.json)}
    both = {"type": "or", "elements": [answer, sequence(written.before, calls, written.after)]}
    return StructuredOutputsParams(structural_tag={"format": _with_tokens(both, special_token_ids)})


def _with_tokens(form: Any, special_token_ids: Mapping[str, int]) -> Any:
    """Return the format of a structural tag with its special tokens, which a grammar does not match as text."""
    if isinstance(form, list):
        return [_with_tokens(item, special_token_ids) for item in form]
    if not isinstance(form, dict) or form.get("type") == "json_schema":
        return form
    if form.get("type") == "const_string":
        found = sorted((text for text in special_token_ids if text in form["value"]), key=len, reverse=True)
        if not found:
            return form
        pieces = filter(None, re.split(f"({'|'.join(map(re.escape, found))})", form["value"]))
        return sequence(*(_token(piece, special_token_ids) for piece in pieces))
    return {
        key: _with_tokens(value, special_token_ids) if key in _NESTED
        else _token(value, special_token_ids) if key == "end"
        else value
        for key, value in form.items()
    }  # fmt: skip


def _token(text: str, special_token_ids: Mapping[str, int]) -> Part:
    token_id = special_token_ids.get(text)
    return text if token_id is None else {"type": "token", "token": token_id}


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
