"""Chat templates, which turn a conversation into the prompt that a checkpoint was trained on."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from quire.common.errors import InvalidPromptError, TokenizerError
from quire.text.chat_template.sandbox import compile_template, render

_CONTINUE_HERE = "QUIRE_CONTINUES_HERE"
_TRIED_TEXT = "QUIRE_TRIES_A_PART"


class ChatTemplate:
    """One compiled template. It runs in a sandbox with limits on time and memory (see sandbox.py)."""

    def __init__(self, source: str) -> None:
        """Raises TokenizerError if `source` is not a valid Jinja template."""
        self._knows_developers = "developer" in source
        try:
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error
        except Exception as error:  # from Python's compiler: nested too deeply, or too long a number
            raise TokenizerError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        content_format: str = "auto",
    ) -> str:
        """Return the conversation as one text, which the model continues.

        With `add_generation_prompt` the text ends with the beginning of the assistant's turn; with
        `continue_final_message` it ends within the last message. `content_format`: see Tokenizer.apply_chat_template.
        Where the template does not mention the role `developer`, OpenAI's newer name of `system`, such messages have
        that role: it would leave them out, refuse them, or write a role that the model does not know. Raises
        InvalidPromptError if messages are malformed or the template rejects them, and TokenizerError if the template
        exceeds its limits.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidPromptError(
                "continue_final_message continues the last turn and add_generation_prompt starts a new one: set one "
                "of them to False"
            )
        checked = check_messages(messages)
        for message in () if self._knows_developers else checked:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        others = {
            **_plain(variables, "chat_template_kwargs"),
            "tools": None if tools is None else _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if content_format == "openai":
            for message in checked:
                if isinstance(message.get("content"), str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        with_parts = [message for message in checked if isinstance(message.get("content"), list)]
        if with_parts and content_format != "openai" and (content_format == "string" or not self._reads_parts(others)):
            for message in with_parts:
                message["content"] = "\n".join(part["text"] for part in message["content"])
        if continue_final_message:
            _mark_continuation(checked[-1])
        text = self._render({**others, "messages": checked})
        return _cut_at_continuation(text) if continue_final_message else text

    def _reads_parts(self, variables: dict[str, Any]) -> bool:
        """Whether the template reads content that is a list of parts. Others fail on it, or print it as it is.

        It is tried for each conversation: a request's variables may change the answer, and must not for others.
        """
        tried = [{"role": "user", "content": [{"type": "text", "text": _TRIED_TEXT}]}]
        try:
            text = self._render({**variables, "messages": tried, "tools": None})
        except (InvalidPromptError, TokenizerError):
            return False
        is_printed = f"'{_TRIED_TEXT}" in text or f'"{_TRIED_TEXT}' in text
        return _TRIED_TEXT in text and not is_printed

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return render(self._template, variables)
        except SecurityError as error:
            raise TokenizerError(f"the chat template is not safe to run: {error}") from error
        except jinja2.TemplateRuntimeError as error:  # raise_exception, or an undefined variable
            raise InvalidPromptError(f"the chat template rejects these messages: {error}") from error
        except Exception as error:  # a template is a program and can fail in any way
            raise InvalidPromptError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error


compile_chat_template = lru_cache(maxsize=16)(ChatTemplate)
"""Returns the template of a source, which is compiled once."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of a conversation as plain data, with content as text. Errors name the message that is invalid.

    A message has a `role` and a `content`: a string or a list of `{"type": "text", "text": ...}` parts. A message that
    only calls tools may have no content; None counts as no content. Other keys are passed to the template unchanged.
    Raises InvalidPromptError.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidPromptError("a conversation must be a list of messages, with at least one")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidPromptError(f"messages[{i}] must be a dict with a 'role' and a 'content'")
        copy = _plain(message, f"messages[{i}]")
        if copy.get("content") is None:
            copy.pop("content", None)
        else:
            copy["content"] = _checked_content(copy["content"], f"messages[{i}]")
        checked.append(copy)
    return checked


def _checked_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidPromptError(
            f"{where}: 'content' must be text or a list of text parts, not {type(content).__name__}"
        )
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        is_text = isinstance(part, dict) and part.setdefault("type", "text") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise InvalidPromptError(f"{where}: only text parts, {{'type': 'text', 'text': ...}}, are supported")
    return parts


def _mark_continuation(message: dict[str, Any]) -> None:
    """Mark the end of a message's text, where the prompt has to end."""
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1]["text"] += _CONTINUE_HERE + " "
    else:
        message["content"] = (content or "") + _CONTINUE_HERE + " "


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidPromptError("tools must be a list of JSON schemas")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidPromptError(f"tools[{i}] must be a JSON schema (a dict), not {type(tool).__name__}")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _plain(value: Any, where: str) -> Any:
    """Return a deep copy made of JSON's types only, so that a template gets no objects with other methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise InvalidPromptError(f"{where} contains a {type(value).__name__}: only types of JSON are allowed")


def _cut_at_continuation(text: str) -> str:
    """Return the text up to the end of the final message, trimmed if the template trims messages."""
    end = text.rfind(_CONTINUE_HERE)
    if end < 0:
        raise InvalidPromptError(
            "continue_final_message: the chat template leaves out the final message, so there is nothing to continue"
        )
    trimmed = not text.startswith(_CONTINUE_HERE + " ", end)
    return text[:end].rstrip() if trimmed else text[:end]
