"""Reads calls and their parts, as all formats of tool calls have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.server.api.tools.json_text import SPACE, read_string, scan_object
from quire.server.api.tools.parsed import ParsedList
from quire.server.api.tools.reader import Reader, Reading

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")
_KEYS = {
    "name": "name", "tool_name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id",
    "tool_call_id": "id", "type": "type",
}  # fmt: skip
"""Keys of a call that is written as an object, by their meaning. Identifiers and types are ignored."""


class CallReader:
    """Reads calls. Text that turns out not to be a call stays in the text that `reader` holds.

    A call begins as soon as its name and the `{` of its arguments are known. It stays a call even if its JSON is
    malformed: the arguments then end there, and the text that follows is content.
    """

    def __init__(self, reader: Reader, found: ParsedList, schemas: Mapping[str, dict[str, Any]]) -> None:
        """`schemas` are those of the functions' arguments, by the functions' names."""
        self.reader = reader
        self.schemas = schemas
        self._found = found

    def new(self) -> Call:
        """A call that has not begun."""
        return Call(self.reader, self._found)

    def space(self) -> Reading[None]:
        """Read white space."""
        yield from self.reader.run(SPACE)

    def name(self) -> Reading[str]:
        """Read the characters that a function's name may have."""
        pieces: list[str] = []
        yield from self.reader.run(_NAME_RUN, pieces.append)
        return "".join(pieces)

    def marks(self, text: str) -> Reading[bool]:
        """Read `text`, with any white space where it has some and before it. False: it is not there, or not whole."""
        for mark in text.split():
            yield from self.space()
            if not (yield from self.reader.match(mark)):
                return False
        return True

    def arguments_of(self, name: str) -> Reading[bool]:
        """Read the arguments, an object, of a call whose name is known. Returns whether they are complete."""
        call = self.new()
        yield from self.space()
        if not call.take_name(name):
            return False
        return (yield from scan_object(self.reader, call.take_arguments))

    def call(self) -> Reading[bool]:
        """Read `{"name": ..., "arguments": {...}}`, in any order, or with `parameters`. True if it is complete."""
        reader, call = self.reader, self.new()
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

    def calls(self) -> Reading[bool]:
        """Read an array of calls, `[{...}, {...}]`. Returns whether it is complete."""
        if not (yield from self.reader.match("[")):
            return False
        while True:
            yield from self.space()
            if not (yield from self.call()):
                return False
            yield from self.space()
            if (yield from self.reader.match("]")):
                self.reader.hold()
                return True
            if not (yield from self.reader.match(",")):
                return False


class Call:
    """One call, which begins when both its name and the beginning of its arguments have been read."""

    def __init__(self, reader: Reader, found: ParsedList) -> None:
        self._reader = reader
        self._found = found
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._sink: Callable[[str], None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it is a call. Otherwise the text may still turn out to be content."""
        return self._sink is not None

    def take_name(self, name: str) -> bool:
        """Set the name. Returns False if it cannot be one."""
        if not FUNCTION_NAME.fullmatch(name):
            return False
        self._name = name
        if self._early:
            self._begin("".join(self._early))
        return True

    def take_arguments(self, piece: str) -> None:
        """Add to the arguments. The text read so far is then no content."""
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
