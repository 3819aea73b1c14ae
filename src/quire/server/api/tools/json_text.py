"""Incremental JSON reader (RFC 8259): checks the text and passes it on unchanged while it arrives."""

import json
import re
from typing import Any

import msgspec

from quire.server.api.tools.reader import Reader, Reading, Sink

MAX_DEPTH = 128
"""Maximum nesting of objects and arrays, which every client's parser supports."""
MAX_NUMBER_CHARS = 128

SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
WORD = re.compile(r"[-+.0-9A-Za-z]+")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""What some models write in JSON as in Python."""
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def read_string(reader: Reader) -> Reading[str | None]:
    """Return the value of a string, or None if there is no string. It may contain lone surrogates, as in JSON."""
    pieces: list[str] = []
    complete = yield from scan_string(reader, pieces.append)
    return str(json.loads("".join(pieces))) if complete else None


def scan_string(reader: Reader, sink: Sink) -> Reading[bool]:
    """Pass on a string with its quotes. Returns False at the first invalid character."""
    if not (yield from reader.match('"')):
        return False
    sink('"')
    while True:
        yield from reader.run(_PLAIN, sink)
        char = yield from reader.ahead()
        if char == '"':
            sink(reader.take(1))
            return True
        if char != "\\":
            return False
        escape = yield from reader.ahead(2)
        if escape == "\\u":
            escape = yield from reader.ahead(6)
        if not _ESCAPE.fullmatch(escape):
            return _cut_off(reader, escape, sink)
        sink(reader.take(len(escape)))


def scan_object(reader: Reader, sink: Sink) -> Reading[bool]:
    """Pass on an object while it arrives. Returns False at the first invalid character, or beyond a limit.

    The text passed on is then the beginning of an object, or nothing if the next character is not `{`.
    """
    if (yield from reader.ahead()) != "{":
        return False
    return (yield from _scan(reader, sink, "{"))


def is_json(text: str) -> bool:
    """Whether a text is one value of JSON, within the limits."""
    reader = Reader()
    reader.push(text)
    reader.end()
    found: list[bool] = []

    def read() -> Reading[None]:
        found.append((yield from _scan(reader, str, _VALUE)))

    next(read(), None)
    return found == [True] and not reader.num_waiting


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments. If they are truncated or not a JSON object, their text is returned as `invalid_json`, so that
    the call is not mistaken for one without arguments."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {"invalid_json": text}


def _scan(reader: Reader, sink: Sink, allowed: str) -> Reading[bool]:
    """Pass on one value. It begins with one of the characters `allowed`, among them `w` for a scalar."""
    closers: list[str] = []  # of what is open
    while True:
        yield from reader.run(SPACE, sink)
        char = yield from reader.ahead()
        kind = char if char in '{}[]:,"' else "w"
        if not char or kind not in allowed:
            return False
        if kind == "w":
            word = yield from reader.run_ahead(WORD, MAX_NUMBER_CHARS)
            if not _SCALAR.fullmatch(word):
                return _cut_off(reader, word, sink)
            sink(reader.take(len(word)))
        elif kind == '"':
            if not (yield from scan_string(reader, sink)):
                return False
        else:
            if kind in "{[" and len(closers) == MAX_DEPTH:
                return False
            sink(reader.take(1))
        if kind in "{[":
            closers.append("}" if kind == "{" else "]")
        elif kind in "}]":
            closers.pop()
        if not closers:
            return True
        allowed = _allowed_after(kind, closers[-1], allowed)


def _cut_off(reader: Reader, token: str, sink: Sink) -> bool:
    """Returns False. If the text ends within an incomplete token, the token is passed on."""
    if reader.ends_with(token):
        sink(reader.take(len(token)))
    return False


_VALUE = '{["w'


def _allowed_after(kind: str, closer: str, allowed: str) -> str:
    """What may follow `kind`, which came where `allowed` might, within what `closer` closes."""
    if kind == "{":
        return '"}'
    if kind == "[":
        return _VALUE + "]"
    if kind == ":":
        return _VALUE
    if kind == ",":
        return '"' if closer == "}" else _VALUE
    is_key = kind == '"' and closer == "}" and "{" not in allowed
    return ":" if is_key else "," + closer
