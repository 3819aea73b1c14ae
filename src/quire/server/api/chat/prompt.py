"""Converts conversations to prompts: checks the messages and applies the chat template."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from quire.common.errors import InvalidPromptError, TokenizerError
from quire.server.api.chat.protocol import ChatCompletionRequest, ChatMessage, ContentPart, Tool
from quire.server.api.pooling.protocol import InputFields
from quire.server.api.shared.sampling import check_generates
from quire.server.api.tokens.protocol import TokenizeRequest
from quire.server.http.errors import invalid
from quire.server.models.served_model import ServedModel

_RESERVED = ("self", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tools",
             "content_format")  # fmt: skip
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
"""Names that chat templates have for a message's reasoning."""
_QUICK_MESSAGES = 32
_QUICK_CHARS = 16_384
"""Shorter conversations are rendered at once, longer ones in a thread, so that the event loop is not blocked."""


class ChatPrompt(TypedDict):
    """A prompt in the format of the engine's interface."""

    prompt: str
    prompt_token_ids: list[int]


async def chat_prompt(
    model: ServedModel,
    request: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any],
) -> ChatPrompt:
    """The prompt of a conversation: its text, and the tokens of that. Raises what `chat_text` raises."""
    if isinstance(request, ChatCompletionRequest):
        check_generates(model)  # clearer than that it has no template
    text = await chat_text(model, request, messages, tools, variables)
    return {"prompt": text, "prompt_token_ids": await model.llm.tokenize(text, bool(request.add_special_tokens))}


async def chat_text(
    model: ServedModel,
    request: ChatCompletionRequest | TokenizeRequest | InputFields,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation, made as the request says. `tools` are those that the template shows, `variables`
    its other variables. Raises ApiError or RequestError for messages, tools or a template that are wrong,
    PromptTooLongError for messages that exceed the template's limits and the context, TokenizerError where there is no
    template."""
    check_client_template(model, request.chat_template)
    variables = template_variables(model, variables)

    def render() -> str:
        try:
            return apply(keeps_text=True)
        except InvalidPromptError:
            if all(_is_object(call.function.arguments) for m in messages for call in m.tool_calls or ()):
                raise
            return apply(keeps_text=False)  # this template reads the arguments of calls by name
        except TokenizerError:
            model.llm.inputs.readable("".join(text for m in messages for text in _texts(m)), cuts=False)
            raise  # what exceeds the template's limits is rarely its fault: more often the messages exceed the context

    def apply(*, keeps_text: bool) -> str:
        return model.llm.tokenizer.apply_chat_template(
            [_plain_message(message, f"messages[{i}]", keeps_text) for i, message in enumerate(messages)],
            tools=msgspec.to_builtins(tools) if tools else None,
            chat_template=request.chat_template,
            content_format=model.args.chat_template_content_format,
            add_generation_prompt=not continues if generates is None else generates,
            continue_final_message=continues,
            **variables,
        )

    continues, generates = bool(request.continue_final_message), request.add_generation_prompt
    is_quick = request.chat_template is None and not tools and not variables and len(messages) <= _QUICK_MESSAGES
    is_quick = is_quick and sum(1 + len(text) for m in messages for text in _texts(m)) <= _QUICK_CHARS
    return render() if is_quick else await asyncio.to_thread(render)


def check_client_template(model: ServedModel, template: str | None) -> None:
    """Raise ApiError for a request's own template, unless they are allowed."""
    if template is not None and not model.args.allow_client_chat_template:
        raise invalid(
            "chat_template is not allowed in requests; the operator can enable allow_client_chat_template",
            "chat_template",
        )


def template_variables(model: ServedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a template: the server's, and those of a request. Raises ApiError for a name that is taken."""
    for name in _RESERVED:
        if name in given:
            raise invalid(f"chat_template_kwargs cannot set {name!r}", "chat_template_kwargs")
    return {**(model.args.default_chat_template_kwargs or {}), **given}


def _texts(message: ChatMessage) -> list[str]:
    """The texts that a template may render."""
    parts = message.content if isinstance(message.content, list) else [ContentPart(text=message.content)]
    calls = [call.function.arguments for call in message.tool_calls or ()]
    texts = [*(part.text for part in parts), message.reasoning_content, message.reasoning, message.refusal, *calls]
    return [text or "" for text in texts]


def _plain_message(message: ChatMessage, where: str, keeps_text: bool) -> dict[str, Any]:
    """The message as templates expect it: without content that is null, and with the arguments of calls as objects.

    A model may have written arguments that are not a JSON object. The conversation must still be able to go on, so the
    template then gets their text: as it is, or as the only argument, `invalid_json`.
    """
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        _check_parts(message.content, f"{where}.content")
    plain.setdefault("content", message.refusal or "")
    if not message.tool_calls:  # some templates take an empty list for calls, and leave the content out
        plain.pop("tool_calls", None)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and not (message.content and message.tool_calls):  # gpt-oss's template refuses all three in a message
        plain |= dict.fromkeys(_REASONING_KEYS, reasoning)
    for call in plain.get("tool_calls") or ():
        text = call["function"]["arguments"]
        if _is_object(text):
            call["function"]["arguments"] = json.loads(text or "{}")
        elif not keeps_text:
            call["function"]["arguments"] = {"invalid_json": text}
    return plain


def content_text(content: str | list[ContentPart] | None) -> str:
    """The text of a message's content. Raises ApiError for parts that are not text."""
    if not isinstance(content, list):
        return content or ""
    _check_parts(content, "content")
    return "\n".join(part.text or "" for part in content)


def _check_parts(content: list[ContentPart], where: str) -> None:
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            kind = part.type[:40]
            message = f"{where}[{i}] has the type {kind!r}; only {{'type': 'text', 'text': ...}} is supported"
            raise invalid(message, f"{where}[{i}]", "unsupported_content")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
