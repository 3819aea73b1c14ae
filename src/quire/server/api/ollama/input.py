"""Converts Ollama's requests to chat requests."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.ollama import protocol as api
from quire.server.http.errors import ApiError, invalid
from quire.server.models.entry import MAX_KEEP_ALIVE_S

_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
FIELD_NAMES: Mapping[str, str] = {
    "prompt": "messages", "max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty",
    "response_format": "format", **{name: f"options.{name}" for name in _SAME},
}  # fmt: skip
"""Names in this API of fields that error messages call otherwise."""
_NEUTRAL = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0}
"""Options for ways of sampling that the engine does not have, with the values that turn them off."""
_THINKING = ("low", "medium", "high")
_UNLIMITED = 2**31  # tokens, more than any context holds
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)")


def chat_of_chat(request: api.ChatRequest) -> ChatCompletionRequest:
    """The chat request with the same meaning. Raises ApiError (400) for what is not supported."""
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages or ())]
    chat = _chat(request, messages)
    chat.tools = request.tools or None
    return chat


def chat_of_generate(request: api.GenerateRequest) -> ChatCompletionRequest:
    """The chat request with the same meaning. Raises ApiError (400) for what is not supported."""
    if request.template:
        raise invalid("template: Ollama's templates are not supported; the checkpoint's own is used", "template")
    if request.suffix:
        raise invalid("suffix: no supported model can fill in text; leave it out", "suffix")
    if request.images:
        raise _images("images")
    system = [{"role": "system", "content": request.system}] if request.system else []
    chat = _chat(request, [*system, {"role": "user", "content": request.prompt or ""}])
    chat.return_token_ids = True  # for `context`
    return chat


def keep_alive_s(given: float | str) -> float | None:
    """Seconds of a duration: a number of seconds, or text such as "5m" or "1h30m". Negative: None, for ever. Raises
    ApiError (400)."""
    text = str(given).strip()
    try:
        seconds = float(text)
    except ValueError:
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text.removeprefix("-"):
            message = f'keep_alive={text[:40]!r}: must be a number of seconds, or a duration such as "5m"'
            raise invalid(message, "keep_alive") from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if text[0] == "-" else 1)
    if math.isnan(seconds):
        raise invalid("keep_alive must be a number of seconds", "keep_alive")
    return None if seconds < 0 or seconds > MAX_KEEP_ALIVE_S else seconds


def _chat(request: api.CommonRequest, messages: Sequence[Mapping[str, Any]]) -> ChatCompletionRequest:
    options = request.options or api.Options()
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise invalid(f"options.{name} is not supported; leave it out", f"options.{name}")
    body: dict[str, Any] = {
        "messages": messages,
        "stream": request.stream is not False,
        "max_tokens": _UNLIMITED if (options.num_predict or 0) < 0 else options.num_predict,
        "repetition_penalty": options.repeat_penalty,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "response_format": _response_format(request.format),
    } | {name: getattr(options, name) for name in _SAME}
    if isinstance(request.think, str):
        if request.think not in _THINKING:
            message = f"think={request.think[:40]!r}: must be true, false or one of {', '.join(_THINKING)}"
            raise invalid(message, "think")
        body["reasoning_effort"] = request.think
    if request.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.think is not False}
        body["include_reasoning"] = request.think is not False
    return msgspec.convert(body, ChatCompletionRequest)


def _response_format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not given:
        return None
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"schema": given}}
    if given != "json":
        raise invalid(f'format={given[:40]!r}: must be "json" or a JSON schema', "format")
    return {"type": "json_object"}


def _message(message: api.InputMessage, where: str) -> dict[str, Any]:
    if message.images:
        raise _images(f"{where}.images")
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"call_{i}") for i, call in enumerate(message.tool_calls)]
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: api.Call, fallback_id: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return {"id": call.id or fallback_id, "function": {"name": call.function.name, "arguments": arguments}}


def _images(where: str) -> ApiError:
    return invalid(f"{where}: images are not supported, the model reads text only", where)
