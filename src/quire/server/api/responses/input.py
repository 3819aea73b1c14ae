"""Converts a request of `/v1/responses` to a chat request: items become messages, fields get chat's names."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.server.api.responses import protocol as api
from quire.server.api.shared.fields import fields_of
from quire.server.http.errors import ApiError

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Allowed values of `include`. The second has no effect, because reasoning is never encrypted."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_SAME_NAMES = ("model", "temperature", "top_p", "parallel_tool_calls", "user")


def new_id(prefix: str) -> str:
    """A new id: `prefix_` and 128 random bits, so that it cannot be guessed."""
    return f"{prefix}_{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Whether this could be the id of a response."""
    return _RESPONSE_ID.fullmatch(text) is not None


def check_request(request: api.ResponsesRequest, *, stores: bool = True) -> None:
    """Raise ApiError 400 for fields and values that are valid but not supported, or if the server `stores` none."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise refused(name, "not supported: send the items in 'input', or set 'previous_response_id'")
    if request.truncation == "auto":
        raise refused("truncation", "'auto' is not supported; use 'disabled'")
    if request.background and request.store is False:
        raise refused("background", "requires store=true, because the response is fetched from the store")
    for name in () if stores else ("background", "store"):
        if getattr(request, name):
            raise refused(name, "not supported: this server stores no responses (response_store_max=0)")
    for name in request.include or ():
        if name not in _INCLUDED:
            raise refused("include", f"{name!r} is not supported; use {', '.join(_INCLUDED)}")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise refused("top_logprobs", f"requires {LOGPROBS!r} in 'include'")


def own_items(request: api.ResponsesRequest) -> list[dict[str, Any]]:
    """The items of the request in full, as they are stored and listed: each with an id, its text as parts.

    Raises ApiError 400 for an item that lacks what its type needs, naming it.
    """
    given = request.input
    items = [api.InputItem(role="user", content=given)] if isinstance(given, str) else given
    full = []
    for i, item in enumerate(items):
        _check_item(item, f"input[{i}]")
        plain: dict[str, Any] = {k: v for k, v in msgspec.to_builtins(item).items() if v is not None}
        plain["id"] = item.id or new_id(_PREFIXES[item.type])
        plain.setdefault("status", "completed")
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            plain["content"] = [{"type": kind, "text": item.content}]
        full.append(plain)
    return full


def chat_request(request: api.ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Body of a chat request with the same meaning; `items` is the conversation, earlier responses included."""
    body: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAMES}
    body["messages"] = chat_messages(msgspec.convert(items, list[api.InputItem]), request.instructions)
    if not body["messages"]:
        raise refused("input", "contains no messages")
    body["max_completion_tokens"] = request.max_output_tokens
    body["response_format"] = _response_format(request.text)
    if request.tools:
        body["tools"] = [_chat_tool(tool) for tool in request.tools]
    body["tool_choice"] = _tool_choice(request.tool_choice)
    if LOGPROBS in (request.include or ()):
        body["logprobs"] = True
        body["top_logprobs"] = request.top_logprobs or 0
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    return fields_of(request) | {name: value for name, value in body.items() if value is not None}


def chat_messages(items: Sequence[api.InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as chat messages.

    `instructions` and the system and developer messages that open the conversation become one system message, since
    most templates take one. Calls and reasoning become part of the assistant's message beside them.
    """
    opening, messages = ([instructions] if instructions else []), list[dict[str, Any]]()
    reasoning: list[str] = []
    names: dict[str | None, str | None] = {}
    for item in items:
        if item.type == "reasoning":
            reasoning.append(_text(item.content) or "\n".join(part.text for part in item.summary or ()))
        elif item.type == "function_call":
            names[item.call_id] = item.name
            _assistant(messages, reasoning).setdefault("tool_calls", []).append(_chat_call(item))
        elif item.type == "function_call_output":
            messages.append(_tool_message(item, names))
        elif item.role == "assistant":
            message = _assistant(messages, reasoning)
            message["content"] = (message["content"] or "") + _text(item.content)
        elif item.role == "user" or messages:
            messages.append({"role": "user" if item.role == "user" else "system", "content": _text(item.content)})
        else:
            opening.append(_text(item.content))
        if item.type != "reasoning":
            reasoning.clear()
    if opening:
        messages.insert(0, {"role": "system", "content": "\n\n".join(opening)})
    return messages


def _assistant(messages: list[dict[str, Any]], reasoning: list[str]) -> dict[str, Any]:
    """The assistant's message that is being assembled; reasoning begins a new one."""
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        messages.append({"role": "assistant", "content": None})
        if reasoning:
            messages[-1]["reasoning_content"] = "\n".join(reasoning)
    return messages[-1]


def _chat_call(item: api.InputItem) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _tool_message(item: api.InputItem, names: Mapping[str | None, str | None]) -> dict[str, Any]:
    name = names.get(item.call_id)
    if name is None:
        raise refused("input", f"contains an output of the call {item.call_id!r}, but no such call precedes it")
    return {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": _text(item.output)}


def _text(content: str | Sequence[api.InputPart | api.ReasoningText] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.refusal if isinstance(part, api.Refusal) else part.text for part in content)  # type: ignore[union-attr]


def _check_item(item: api.InputItem, where: str) -> None:
    needed = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }[item.type]
    for name in needed:
        if getattr(item, name) is None:
            raise refused(f"{where}.{name}", f"is missing: items of type {item.type!r} require it")
    readable = (api.InputText, api.OutputText, api.Refusal) if item.type != "reasoning" else (api.ReasoningText,)
    for name in ("content", "output"):
        parts = getattr(item, name)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, api.InputImage | api.InputFile):
                raise refused(f"{where}.{name}[{i}]", "images and files are not supported: the model reads text only")
            if not isinstance(part, readable):
                raise refused(f"{where}.{name}[{i}]", f"is not allowed in an item of type {item.type!r}")


def _chat_tool(tool: api.FunctionTool) -> dict[str, Any]:
    function = {name: value for name, value in msgspec.structs.asdict(tool).items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: api.ToolChoice | None) -> Any:
    match choice:
        case api.FunctionChoice():
            return {"type": "function", "function": {"name": choice.name}}
        case api.AllowedTools():
            allowed = {"mode": choice.mode, "tools": [_tool_choice(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _response_format(text: api.TextConfig | None) -> dict[str, Any] | None:
    if text is None or isinstance(text.format, api.TextFormat):
        return None
    fields = {name: value for name, value in msgspec.structs.asdict(text.format).items() if value is not None}
    if isinstance(text.format, api.JsonSchemaFormat):
        return {"type": "json_schema", "json_schema": fields}
    return {"type": text.format.__struct_config__.tag, **fields}


def refused(param: str, reason: str) -> ApiError:
    """400, naming the field and why."""
    return ApiError(400, f"{param}: {reason}", param=param)
