"""Converts a request of `/v1/messages` to a chat request: blocks become messages, fields get chat's names."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from quire.server.api.messages import protocol as api
from quire.server.api.responses.input import refused
from quire.server.api.shared.fields import fields_of
from quire.server.http.errors import ApiError


def chat_request(request: api.MessagesRequest) -> dict[str, Any]:
    """Return the body of a chat request with the same meaning. Raises ApiError 400 for unsupported fields."""
    for name in ("container", "mcp_servers"):
        if getattr(request, name):
            raise refused(name, "not supported: this server runs no tools")
    output = request.output_config or api.OutputConfig()
    body: dict[str, Any] = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": request.metadata.user_id if request.metadata is not None else None,
        "include_reasoning": False if request.thinking is not None and request.thinking.display == "omitted" else None,
    }
    if output.format is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format.schema}}
    given = {name: value for name, value in body.items() if value is not None}
    return prompt_request(request) | fields_of(request) | given | _template_kwargs(request)


def prompt_request(request: api.CountTokensRequest) -> dict[str, Any]:
    """The fields of the chat request that determine the prompt. A last message of the assistant is continued."""
    messages = chat_messages(request.messages, request.system)
    body: dict[str, Any] = {"messages": messages, "model": request.model}
    if messages[-1]["role"] == "assistant":
        if messages[-1].get("tool_calls"):
            raise refused("messages", "ends with a tool call; its 'tool_result' must follow")
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        body["tools"] = [_chat_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    if request.output_config is not None and request.output_config.effort is not None:
        body["reasoning_effort"] = request.output_config.effort
    return body | _template_kwargs(request)


def chat_messages(
    messages: Sequence[api.InputMessage],
    system: str | Sequence[api.TextBlock | api.ImageBlock | api.DocumentBlock] | None,
) -> list[dict[str, Any]]:
    """The conversation as chat messages. Consecutive messages of a role are one turn, as in Anthropic's API: many
    templates refuse two of them. `system` and the system messages at the beginning become one. Results of tools are
    messages of their own, in the order of the blocks."""
    opening = [system] if isinstance(system, str) else [_joined(_with_places(system or (), "system"), "system")]
    chat: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for role, turn in groupby(enumerate(messages), lambda numbered: numbered[1].role):
        blocks = [block for i, message in turn for block in _placed(message, f"messages[{i}]")]
        if role == "assistant":
            chat.append(_assistant_message(blocks, names))
        elif role == "user":
            chat += _user_messages(blocks, names)
        elif chat:
            chat.append({"role": "system", "content": _joined(blocks, "system")})
        else:
            opening.append(_joined(blocks, "system"))
    if not chat:
        raise refused("messages", "contains no message of the user or the assistant")
    text = "\n\n".join(filter(None, opening))
    return [{"role": "system", "content": text}, *chat] if text else chat


def _with_places(blocks: Sequence[api.Block], where: str) -> list[tuple[str, api.Block]]:
    return [(f"{where}[{i}]", block) for i, block in enumerate(blocks)]


def _placed(message: api.InputMessage, where: str) -> list[tuple[str, api.Block]]:
    """The blocks of a message, each with its place in the request."""
    if isinstance(message.content, str):
        return [(f"{where}.content", api.TextBlock(message.content))]
    if not message.content and message.role != "assistant":
        raise refused(f"{where}.content", "is empty")
    return _with_places(message.content, f"{where}.content")


def _assistant_message(blocks: Sequence[tuple[str, api.Block]], names: dict[str, str]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for place, block in blocks:
        match block:
            case api.TextBlock():
                texts.append(block.text)
            case api.ThinkingBlock():
                reasoning.append(block.thinking)
            case api.ToolUseBlock():
                names[block.id] = block.name
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case api.ToolResultBlock() | api.ImageBlock() | api.DocumentBlock():
                raise _misplaced(block, place, "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[tuple[str, api.Block]], names: dict[str, str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for place, block in blocks:
        match block:
            case api.TextBlock():
                texts.append(block.text)
            case api.ToolResultBlock():
                flush()
                messages.append(_tool_message(block, names, place))
            case _:
                raise _misplaced(block, place, "user")
    flush()
    return messages


def _tool_message(block: api.ToolResultBlock, names: dict[str, str], place: str) -> dict[str, Any]:
    name = names.get(block.tool_use_id)
    if name is None:
        raise refused(f"{place}.tool_use_id", f"no preceding 'tool_use' has the id {block.tool_use_id[:100]!r}")
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(_with_places(content, f"{place}.content"), "user")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text}


def _joined(blocks: Sequence[tuple[str, api.Block]], role: str) -> str:
    texts = []
    for place, block in blocks:
        if not isinstance(block, api.TextBlock):
            raise _misplaced(block, place, role)
        texts.append(block.text)
    return "\n".join(texts)


def _misplaced(block: api.Block, place: str, role: str) -> ApiError:
    kind = block.__struct_config__.tag
    if isinstance(block, api.ImageBlock | api.DocumentBlock):
        return refused(place, f"blocks of type {kind!r} are not supported: the model reads text only")
    return refused(place, f"a block of type {kind!r} is not allowed in a message of role {role!r}")


def _chat_tool(tool: api.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: api.ToolChoice) -> dict[str, Any]:
    body: dict[str, Any] = {"tool_choice": choice.type}
    if choice.type == "tool":
        if choice.name is None:
            raise refused("tool_choice.name", "is missing: type 'tool' requires the name of a tool")
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False
    return body


def _template_kwargs(request: api.CountTokensRequest) -> dict[str, Any]:
    """Templates of models that can think or not take the variable `enable_thinking`."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        kwargs.setdefault("enable_thinking", request.thinking.type in ("enabled", "adaptive"))
    return {"chat_template_kwargs": kwargs} if kwargs else {}
