"""Formats in which models write tool calls and reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

from quire.common.arguments.vllm_arguments import own_format
from quire.common.errors import ConfigError
from quire.server.api.tools.json_text import SPACE, read_string, scan_object
from quire.server.api.tools.parsed import ParsedList
from quire.server.api.tools.reader import Reader, Reading

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")
_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}
"""Keys of a call that is written as an object. The last two, which some models write, are ignored."""


class CallReader:
    """Reads calls. Text that turns out not to be a call stays in the text that `reader` holds.

    A call begins as soon as its name and the `{` of its arguments are known. It stays a call even if its JSON is
    malformed: the arguments then end there, and the text that follows is content.
    """

    def __init__(self, reader: Reader, found: ParsedList) -> None:
        self.reader = reader
        self._found = found

    def space(self) -> Reading[None]:
        """Read white space."""
        yield from self.reader.run(SPACE)

    def arguments_of(self, name: str) -> Reading[bool]:
        """Read the arguments, an object, of a call whose name is known. Returns whether they are complete."""
        call = _Call(self.reader, self._found)
        if not call.take_name(name):
            return False
        return (yield from scan_object(self.reader, call.take_arguments))

    def call(self) -> Reading[bool]:
        """Read `{"name": ..., "arguments": {...}}`, in any order, or with `parameters`. True if it is complete."""
        reader, call = self.reader, _Call(self.reader, self._found)
        missing = dict(_KEYS)
        if not (yield from reader.match("{")):
            return False
        while True:
            yield from self.space()
            key = missing.get((yield from read_string(reader)) or "")
            if key is None:
                return False
            missing = {name: meaning for name, meaning in missing.items() if meaning != key}
            yield from self.space()
            if not (yield from reader.match(":")):
                return False
            yield from self.space()
            if key == "arguments":
                if not (yield from scan_object(reader, call.take_arguments)):
                    return False
            else:
                value = yield from read_string(reader)
                if value is None or (key == "name" and not call.take_name(value)):
                    return False
            yield from self.space()
            if (yield from reader.match("}")):
                if call.has_begun:
                    reader.hold()
                return call.has_begun
            if not (yield from reader.match(",")):
                return False

    def calls(self) -> Reading[None]:
        """Read an array of calls, `[{...}, {...}]`."""
        if not (yield from self.reader.match("[")):
            return
        while True:
            yield from self.space()
            if not (yield from self.call()):
                return
            yield from self.space()
            if (yield from self.reader.match("]")):
                self.reader.hold()
                return
            if not (yield from self.reader.match(",")):
                return


class _Call:
    """One call, which begins when both its name and the beginning of its arguments have been read."""

    def __init__(self, reader: Reader, found: ParsedList) -> None:
        self._reader = reader
        self._found = found
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._sink: Callable[[str], None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._sink is not None

    def take_name(self, name: str) -> bool:
        if not FUNCTION_NAME.fullmatch(name):
            return False
        self._name = name
        if self._early:
            self._begin("".join(self._early))
        return True

    def take_arguments(self, piece: str) -> None:
        if self._sink is not None:
            self._sink(piece)
            self._reader.hold()
        elif self._name is not None:
            self._begin(piece)
        else:
            self._early.append(piece)

    def _begin(self, arguments: str) -> None:
        assert self._name is not None
        self._sink = self._found.call_began(self._name, arguments)
        self._reader.hold()


ReadCalls: TypeAlias = Callable[[CallReader], Reading[None]]


def _read_hermes(calls: CallReader) -> Reading[None]:
    yield from calls.space()
    complete = yield from calls.call()
    if complete or calls.reader.is_blank:  # blank: a call of which nothing but the last brace is missing
        yield from calls.space()
        if (yield from calls.reader.match("</tool_call>")):
            calls.reader.hold()


def _read_llama3_json(calls: CallReader) -> Reading[None]:
    while True:
        yield from calls.space()
        if not (yield from calls.call()):
            return
        yield from calls.space()
        if not (yield from calls.reader.match(";")):
            return


def _read_mistral(calls: CallReader) -> Reading[None]:
    reader = calls.reader
    yield from calls.space()
    if (yield from reader.ahead()) == "[":
        yield from calls.calls()
        return
    name: list[str] = []
    yield from reader.run(_NAME_RUN, name.append)
    if (yield from reader.match("[CALL_ID]")):
        yield from reader.run(_NAME_RUN)
    yield from reader.match("[ARGS]")
    yield from calls.space()
    yield from calls.arguments_of("".join(name))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls of a family of models."""

    name: str
    tag: str
    """Precedes calls."""
    read: ReadCalls
    """Reads the text after the tag."""
    begins_bare: bool = False
    """Whether a call at the beginning of the output needs no tag."""
    end: str = ""
    """Follows a call that a grammar writes."""
    space: str = ""
    """Between a call and the tags around it."""
    separator: str | None = None
    """Between two calls. None: the calls are items of an array."""
    arguments: str = "arguments"
    """Key of the arguments."""
    excludes_content: bool = False
    """Whether an output that does not begin with a call is content, whatever it contains."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around a model's reasoning at the beginning of its output."""

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    """Whether the prompt ends with the start tag."""

    def __post_init__(self) -> None:
        if not self.start.strip() or not self.end.strip() or self.start == self.end:
            raise ConfigError(f"the reasoning tags {self.start!r} and {self.end!r} must be different and not blank")

    def after(self, prompt: str) -> ReasoningFormat:
        """Return the format of an answer to `prompt`, of which only the end matters."""
        return replace(self, is_open=prompt.rstrip().endswith(self.start))


TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat("hermes", "<tool_call>", _read_hermes, end="</tool_call>", space="\n", separator="\n"),
        ToolFormat(
            "llama3_json", "<|python_tag|>", _read_llama3_json, begins_bare=True, separator="; ", arguments="parameters"
        ),
        ToolFormat("mistral", "[TOOL_CALLS]", _read_mistral),
    )
}
REASONING_FORMATS = {"think": ReasoningFormat(), "mistral": ReasoningFormat("[THINK]", "[/THINK]")}


def choose_tool_format(choice: str, chat_template: str | None) -> ToolFormat | None:
    """The format of that name; None for `none`; for `auto` the one whose tags the template has. Raises ConfigError."""
    choice = own_format("tool_parser", choice, list(TOOL_FORMATS))
    if choice == "auto":
        return _tool_format_of(chat_template or "")
    if choice != "none" and choice not in TOOL_FORMATS:
        raise ConfigError(f"tool_format={choice!r}: must be auto, none, {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS.get(choice)


def _tool_format_of(template: str) -> ToolFormat | None:
    if "<tool_call>" in template:
        has_json_calls = "<function=" not in template  # calls written as XML begin with the same tag
        return TOOL_FORMATS["hermes"] if has_json_calls else None
    if "[TOOL_CALLS]" in template:
        return TOOL_FORMATS["mistral"]
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return TOOL_FORMATS["llama3_json"]
    return None


def choose_reasoning_format(choice: str, chat_template: str | None) -> ReasoningFormat | None:
    """Return the format as `choose_tool_format` does. Tags of another format are written `START...END`."""
    choice = own_format("reasoning_parser", choice, list(REASONING_FORMATS))
    if choice == "auto":
        template = chat_template or ""
        return next((known for known in REASONING_FORMATS.values() if known.end in template), None)
    if choice == "none" or choice in REASONING_FORMATS:
        return REASONING_FORMATS.get(choice)
    start, dots, end = choice.partition("...")
    if not dots:
        raise ConfigError(
            f"reasoning_parser={choice!r}: must be auto, none, {', '.join(REASONING_FORMATS)} or START...END"
        )
    return ReasoningFormat(start, end)


def shows_special_tokens(
    reasoning: ReasoningFormat | None, tools: ToolFormat | None, special_token_texts: Collection[str]
) -> bool:
    """Whether a tag is a special token, so that special tokens must stay in the text that is parsed."""
    tags = [tools.tag] if tools else []
    tags += [reasoning.start, reasoning.end] if reasoning else []
    return any(tag in special_token_texts for tag in tags)
