"""The styles in which models write tool calls: how they are read, and how a grammar writes them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from quire.server.api.tools.call_reader import CallReader
from quire.server.api.tools.reader import Reading
from quire.server.api.tools.schemas import array_schema, call_schema

Part: TypeAlias = str | dict[str, Any]
"""A part of a call as a grammar writes it: text, or a format of structural tags."""
Schemas: TypeAlias = Mapping[str, dict[str, Any]]
"""The schemas of functions' arguments, by the functions' names."""


@dataclass(frozen=True, slots=True)
class Written:
    """Calls as a grammar writes them."""

    calls: list[list[Part]]
    """The alternatives for one call, each a sequence."""
    between: str | None
    """Between two calls. None: there is only one."""
    before: str = ""
    after: str = ""


class CallStyle(Protocol):
    """Reads and writes calls. Immutable; what it reads goes to the CallReader."""

    def read(self, calls: CallReader, tag: str) -> Reading[None]:
        """Read the text after `tag`. Text that is not a call stays in the text that the reader holds."""

    def written(self, tag: str, schemas: Schemas, parallel: bool) -> Written:
        """The calls of these functions after `tag`; only one, unless `parallel`."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls that are JSON objects: one after each tag, or several with separators, or an array of them."""

    end: str = ""
    """Follows the calls after one tag."""
    space: str = ""
    """Between calls and the tags around them."""
    separator: str | None = None
    """Between two calls. None: a grammar writes an array."""
    name_key: str = "name"
    arguments_key: str = "arguments"

    def read(self, calls: CallReader, tag: str) -> Reading[None]:
        """Read calls in either form."""
        yield from calls.space()
        if (yield from calls.reader.ahead()) == "[":
            complete = yield from calls.calls()
        else:
            complete = yield from self._separated(calls)
        is_end = complete or calls.reader.is_blank  # blank: nothing but a call's last brace is missing
        if self.end and is_end and (yield from calls.marks(self.end)):
            calls.reader.hold()

    def _separated(self, calls: CallReader) -> Reading[bool]:
        mark = (self.separator or "").strip()
        while (yield from calls.call()):
            yield from calls.space()
            if not mark or not (yield from calls.reader.match(mark)):
                return True
            yield from calls.space()
        return False

    def written(self, tag: str, schemas: Schemas, parallel: bool) -> Written:
        """An array, or objects, each with the tags around it."""
        schema = call_schema(schemas, self.name_key, self.arguments_key)
        if self.separator is None:
            schema = array_schema(schema, parallel)
        call = {"type": "json_schema", "json_schema": schema}
        return Written([[tag + self.space, call, self.space + self.end]], self.separator)


_INDEX = re.compile("[:0-9]+")


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls that are a name and the JSON of the arguments, each between marks."""

    before_name: str
    after_name: str
    after_call: str = ""
    end: str = ""
    """Follows the last call."""
    separator: str | None = ""
    """Between two calls. None: there is only one."""
    index: str = ""
    """Follows the name: a colon and a number. Any number is read."""

    def read(self, calls: CallReader, tag: str) -> Reading[None]:
        """Read calls, of which there are several after one tag."""
        while (yield from calls.marks(self.before_name)):
            name = yield from calls.name()
            if self.index:
                yield from calls.reader.run(_INDEX)
            if not (yield from calls.marks(self.after_name)) or not (yield from calls.arguments_of(name)):
                return
            if (yield from calls.marks(self.after_call)):
                calls.reader.hold()
            yield from calls.marks(self.separator or "")
        if (yield from calls.marks(self.end)):
            calls.reader.hold()

    def written(self, tag: str, schemas: Schemas, parallel: bool) -> Written:
        """Calls between the tag and the end."""
        return Written(_named_calls(self.before_name, self.index + self.after_name, self.after_call, schemas),
                       self.separator, tag, self.end)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """Mistral's calls: an array of objects, or a name and arguments after each tag. Both forms are always read."""

    is_named: bool
    """Whether a grammar writes the second form, that of tokenizers from version 11 on."""

    def read(self, calls: CallReader, tag: str) -> Reading[None]:
        """Read an array or one named call, which may have an identifier, and no mark before its arguments."""
        reader = calls.reader
        yield from calls.space()
        if (yield from reader.ahead()) == "[":
            yield from calls.calls()
            return
        name = yield from calls.name()
        if (yield from reader.match("[CALL_ID]")):
            yield from calls.name()
        yield from reader.match("[ARGS]")
        yield from calls.arguments_of(name)

    def written(self, tag: str, schemas: Schemas, parallel: bool) -> Written:
        """The calls in one of the forms."""
        if not self.is_named:
            return JsonCalls().written(tag, schemas, parallel)
        return Written(_named_calls(tag, "[ARGS]", "", schemas), "")


def _named_calls(before: str, between: str, after: str, schemas: Schemas) -> list[list[Part]]:
    return [
        [before + name + between, {"type": "json_schema", "json_schema": schema}, after]
        for name, schema in schemas.items()
    ]


def const(text: str) -> dict[str, Any]:
    """A text as a format of structural tags."""
    return {"type": "const_string", "value": text}


def sequence(*parts: Part) -> dict[str, Any]:
    """Parts in this order, as one format."""
    return {"type": "sequence", "elements": [const(part) if isinstance(part, str) else part for part in parts]}


def optional(part: dict[str, Any]) -> dict[str, Any]:
    """A part that may be missing."""
    return {"type": "or", "elements": [const(""), part]}
