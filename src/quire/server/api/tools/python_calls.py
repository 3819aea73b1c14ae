"""Calls that are written as in Python, `name(key=value, ...)`, with Python's literals or JSON's as values."""

import json
import re
from dataclasses import dataclass

from quire.server.api.tools.call_reader import Call, CallReader
from quire.server.api.tools.call_styles import Part, Schemas, Written, optional, sequence
from quire.server.api.tools.json_text import MAX_DEPTH, MAX_NUMBER_CHARS, PYTHON_WORDS, SPACE, WORD, is_json
from quire.server.api.tools.reader import Reader, Reading, Sink
from quire.server.api.tools.schemas import property_schemas, required

_KEY = re.compile(r"\w+")
_TEXTS = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPES = {char: char for char in "\\'\""} | dict(
    zip("ntrbfva\n", ["\n", "\t", "\r", "\b", "\f", "\v", "\a", ""], strict=True)
)
_HEX = re.compile("[0-9A-Fa-f]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls between `open` and `end`, with `separator` between them. Strings are streamed as they arrive."""

    open: str
    separator: str
    end: str
    after: str = ""
    """May follow the end."""

    def read(self, calls: CallReader, tag: str) -> Reading[None]:
        """Read calls. Each begins when its first key and `=`, or its `)`, are known. Arguments that break off are
        closed, unless the output ends there."""
        if not (yield from calls.marks(self.open)):
            return
        is_first = True
        while is_first or not (yield from calls.marks(self.end)):
            call, is_first = calls.new(), False
            yield from calls.space()
            name = yield from calls.name()
            if not call.take_name(name) or not (yield from calls.reader.match("(")):
                return
            if not (yield from _arguments(calls, call)):
                if call.has_begun and (yield from calls.reader.ahead()):
                    rest = calls.reader.release()
                    call.take_arguments("}")
                    calls.reader.hold(rest)
                return
            yield from calls.marks(self.separator)
        calls.reader.hold()
        if (yield from calls.marks(self.after)):
            calls.reader.hold()

    def written(self, tag: str, schemas: Schemas, parallel: bool) -> Written:
        """Calls with all required arguments, the others being optional, each with a comma behind it."""
        calls: list[list[Part]] = []
        for name, schema in schemas.items():
            needed, types = required(schema), property_schemas(schema)
            call: list[Part] = [f"{name}("]
            for key in filter(_KEY.fullmatch, dict.fromkeys([*types, *needed])):
                value = {"type": "json_schema", "json_schema": types.get(key, {})}
                pair = sequence(f"{key}=", value, ",")
                call.append(pair if key in needed else optional(pair))
            calls.append([*call, ")"])
        return Written(calls, self.separator, tag + self.open, self.end)


def _arguments(calls: CallReader, call: Call) -> Reading[bool]:
    """Read keys and values up to `)`. Returns whether it was found."""
    reader = calls.reader
    while True:
        yield from calls.space()
        if (yield from reader.match(")")):
            call.take_arguments("}" if call.has_begun else "{}")
            return True
        pieces: list[str] = []
        yield from reader.run(_KEY, pieces.append)
        yield from calls.space()
        if not pieces or not (yield from reader.match("=")):
            return False
        key = json.dumps("".join(pieces), ensure_ascii=False)
        call.take_arguments(f"{', ' if call.has_begun else '{'}{key}: ")
        if not (yield from _value(reader, call.take_arguments, 0)):
            return False
        yield from calls.space()
        if not (yield from reader.match(",")) and (yield from reader.ahead()) != ")":
            return False


def _value(reader: Reader, sink: Sink, depth: int) -> Reading[bool]:
    """Pass on one literal as JSON. Returns False at the first character that fits none, or beyond a limit."""
    yield from reader.run(SPACE)
    char = yield from reader.ahead()
    if char in _TEXTS:
        return (yield from _string(reader, char, sink))
    if char and char in "[{" and depth < MAX_DEPTH:
        return (yield from _items(reader, sink, depth, "]" if char == "[" else "}"))
    word = yield from reader.run_ahead(WORD, MAX_NUMBER_CHARS)
    text = PYTHON_WORDS.get(word, word)
    if not text or not is_json(text) or reader.ends_with(word):
        return False
    reader.take(len(word))
    sink(text)
    return True


def _items(reader: Reader, sink: Sink, depth: int, end: str) -> Reading[bool]:
    """A list or a dictionary with strings as keys, in which a last comma may be."""
    sink(reader.take(1))
    before = ""
    while True:
        yield from reader.run(SPACE)
        if (yield from reader.match(end)):
            sink(end)
            return True
        sink(before)
        if end == "}":
            quote = yield from reader.ahead()
            if quote not in _TEXTS or not (yield from _string(reader, quote, sink)):
                return False
            yield from reader.run(SPACE)
            if not (yield from reader.match(":")):
                return False
            sink(": ")
        if not (yield from _value(reader, sink, depth + 1)):
            return False
        yield from reader.run(SPACE)
        if not (yield from reader.match(",")) and (yield from reader.ahead()) != end:
            return False
        before = ", "


def _string(reader: Reader, quote: str, sink: Sink) -> Reading[bool]:
    """Pass on a string in `quote`s, with Python's escapes. Unknown escapes are kept, as in Python."""
    reader.take(1)
    sink('"')
    while True:
        yield from reader.run(_TEXTS[quote], lambda piece: sink(json.dumps(piece, ensure_ascii=False)[1:-1]))
        if (yield from reader.match(quote)):
            sink('"')
            return True
        char = (yield from reader.ahead(2))[1:]
        if not char:
            return False
        length = _HEX_DIGITS.get(char, 0)
        digits = (yield from reader.ahead(2 + length))[2:] if length else ""
        code = int(digits, 16) if length and _HEX.fullmatch(digits) and len(digits) == length else -1
        if 0 <= code < 0x110000:
            text = chr(code)
        else:
            length, text = 0, _ESCAPES.get(char, "\\" + char)
        reader.take(2 + length)
        sink(json.dumps(text)[1:-1])
