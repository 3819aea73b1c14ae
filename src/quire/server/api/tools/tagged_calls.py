"""Calls whose arguments are texts between tags, as in XML, instead of JSON."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.api.tools.call_reader import Call, CallReader
from quire.server.api.tools.call_styles import Part, Schemas, Written, const, optional, sequence
from quire.server.api.tools.json_text import PYTHON_WORDS, is_json
from quire.server.api.tools.reader import Reader, Reading, Sink
from quire.server.api.tools.schemas import json_type, json_types, listed, properties, property_schemas, required

_KEY, _QUOTED_KEY = re.compile(r"[^<>\r\n]+"), re.compile(r"[^<>\r\n\"]+")
_TEXT = frozenset(["string"])


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls with a name and a list of arguments, each a key and a value between tags.

    A value whose schema allows only strings is a text and streamed as it arrives. Any other is JSON if it is valid and
    of a type that its schema allows, otherwise a text, too; it is emitted when it is complete.
    """

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    """A line break at its end does not belong to the value, nor does then one after the value."""
    after_value: str
    end: str
    states_strings: bool = False
    """Whether `after_key` has a place, `{}`, where `true` or `false` says if the value is a text, or JSON."""

    def read(self, calls: CallReader, tag: str) -> Reading[None]:
        """Read one call. It begins when its name and the first key, or its end, are known. `before_name` may be
        missing after the tag, and all of `end` but its first part. Arguments that break off are closed, unless the
        output ends there."""
        if tag != self.before_name.strip() and not (yield from calls.marks(self.before_name)):
            return
        call = calls.new()
        yield from calls.space()
        name = yield from calls.name()
        if not call.take_name(name) or not (yield from calls.marks(self.after_name)):
            return
        last, *ends = self.end.split()
        if not (yield from self._arguments(calls, call, properties(calls.schemas.get(name, {})))):
            return
        if (yield from calls.marks(last)):
            call.take_arguments("}" if call.has_begun else "{}")
            yield from self._ends(calls, ends)
        elif call.has_begun and (yield from calls.reader.ahead()):
            rest = calls.reader.release()
            call.take_arguments("}")
            calls.reader.hold(rest)

    def _ends(self, calls: CallReader, ends: list[str]) -> Reading[None]:
        for mark in ends:
            if (yield from calls.marks(mark)):
                calls.reader.hold()

    def _arguments(self, calls: CallReader, call: Call, schemas: dict[str, Any]) -> Reading[bool]:
        """Read keys and values. Returns False if the output ends within a value."""
        line_break = "\n" if self.after_key.endswith("\n") else ""
        end, keys = self.after_value.strip(), _QUOTED_KEY if self.after_key.startswith('"') else _KEY
        while (yield from calls.marks(self.before_key)):
            pieces: list[str] = []
            yield from calls.reader.run(keys, pieces.append)
            key = "".join(pieces).strip()
            types = json_types(schemas.get(key))
            if self.states_strings:
                before, _, after = self.after_key.partition("{}")
                stated = (yield from calls.marks(before)) and (yield from calls.reader.match_any(["true", "false"]))
                if not key or not stated or not (yield from calls.reader.match(after)):
                    return True
                types = _TEXT if stated == "true" else frozenset()
            elif not key or not (yield from calls.marks(self.after_key)):
                return True
            call.take_arguments(f"{', ' if call.has_begun else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            yield from calls.reader.match(line_break)
            if types == _TEXT:
                complete = yield from _scan_text(calls.reader, end, line_break, call.take_arguments)
            else:
                complete = yield from _scan_value(calls.reader, end, line_break, types, call.take_arguments)
            if not complete:
                return False
        return True

    def written(self, tag: str, schemas: Schemas, parallel: bool) -> Written:
        """Calls with all required arguments, the others being optional, in the order of the schema."""
        calls: list[list[Part]] = [
            [tag + self.before_name + name + self.after_name, *self._written_arguments(schema), self.end]
            for name, schema in schemas.items()
        ]
        return Written(calls, "\n")

    def _written_arguments(self, schema: dict[str, Any]) -> Iterator[Part]:
        needed, schemas = required(schema), property_schemas(schema)
        for key in dict.fromkeys([*schemas, *needed]):
            is_text = json_types(schemas.get(key)) == _TEXT
            head = self.before_key + key + self.after_key.replace("{}", json.dumps(is_text))
            pair = sequence(head, *self._written_value(schemas.get(key, {})))
            yield pair if key in needed else optional(pair)

    def _written_value(self, schema: dict[str, Any]) -> list[Part]:
        if json_types(schema) != _TEXT:
            return [{"type": "json_schema", "json_schema": schema}, self.after_value]
        if texts := [text for text in listed(schema) if isinstance(text, str)]:
            return [{"type": "or", "elements": [*map(const, texts)]}, self.after_value]
        mark = self.after_value.rstrip()
        text = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": mark}
        return [text, self.after_value[len(mark) :]]


def _scan_text(reader: Reader, end: str, line_break: str, sink: Sink) -> Reading[bool]:
    """Pass on text up to `end`, without a last line break, as a string of JSON. Returns False if there is no end."""
    kept = ""

    def write(piece: str) -> None:
        nonlocal kept
        text = kept + piece
        kept = line_break if line_break and text.endswith(line_break) else ""
        if text := text.removesuffix(kept):
            sink(json.dumps(text, ensure_ascii=False)[1:-1])

    sink('"')
    if not (yield from reader.until([end], write)):
        return False
    sink('"')
    return True


def _scan_value(reader: Reader, end: str, line_break: str, types: frozenset[str], sink: Sink) -> Reading[bool]:
    """Pass on text up to `end` as one value of JSON, of one of the types. Returns False if there is no end."""
    pieces: list[str] = []
    found = yield from reader.until([end], pieces.append)
    text = "".join(pieces).removesuffix(line_break)
    value = PYTHON_WORDS.get(text.strip(), text.strip())
    is_value = (not types or json_type(value) in types) and is_json(value)
    if found or text:
        sink(value if is_value else json.dumps(text, ensure_ascii=False))
    return bool(found)
