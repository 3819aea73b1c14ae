"""The parts that a parser finds in a model's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ParsedContent:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedReasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A piece of a call: `id` and `name` come once, with the first piece; the arguments' pieces add up to JSON text."""

    tool_index: int
    id: str | None
    name: str | None
    arguments: str


Parsed: TypeAlias = ParsedContent | ParsedReasoning | ParsedToolCall


class ParsedList:
    """Gathers what is found, and decides about the white space between.

    White space beside reasoning and beside calls belongs to their form and is left out; between a call and content
    behind it, it is kept.
    """

    def __init__(self, new_id: Callable[[], str], max_calls: int | None) -> None:
        self._new_id = new_id
        self._max_calls = max_calls
        self._found: list[Parsed] = []
        self._content = _Trimmer(leading=False)
        self._reasoning = _Trimmer(leading=True)
        self._num_calls = 0
        self._is_behind_call = False

    def take(self) -> list[Parsed]:
        """What was found since the last time."""
        found, self._found = self._found, []
        return found

    def content(self, text: str) -> None:
        """Add to the answer."""
        if text := self._content.add(text):
            self._found.append(ParsedContent(text))
            self._is_behind_call = False

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        if text := self._reasoning.add(text):
            self._found.append(ParsedReasoning(text))

    def reasoning_ended(self) -> None:
        """Content begins; white space before it is dropped."""
        self._content = _Trimmer(leading=True)

    def call_began(self, name: str, arguments: str) -> Callable[[str], None]:
        """A new call. Returns the sink of its further arguments."""
        self._content.drop()
        self._is_behind_call = True
        index, self._num_calls = self._num_calls, self._num_calls + 1
        if self._max_calls is not None and index >= self._max_calls:
            return _ignore
        self._found.append(ParsedToolCall(index, self._new_id(), name, arguments))
        return lambda piece: self._found.append(ParsedToolCall(index, None, None, piece))

    def end(self) -> None:
        """The output has ended."""
        if not self._is_behind_call and (text := self._content.rest()):
            self._found.append(ParsedContent(text))


def merged(found: list[Parsed]) -> list[Parsed]:
    """The same with neighbours of one kind as one."""
    return [_joined(list(group)) for _, group in groupby(found, _kind)]


def _kind(parsed: Parsed) -> int | type:
    return parsed.tool_index if isinstance(parsed, ParsedToolCall) else type(parsed)


def _joined(group: list[Parsed]) -> Parsed:
    first = group[0]
    if len(group) == 1:
        return first
    if isinstance(first, ParsedToolCall):
        arguments = "".join(piece.arguments for piece in group if isinstance(piece, ParsedToolCall))
        return ParsedToolCall(first.tool_index, first.id, first.name, arguments)
    return type(first)("".join(piece.text for piece in group if not isinstance(piece, ParsedToolCall)))


class _Trimmer:
    """Lets text through, but keeps white space back until it is known what follows."""

    def __init__(self, *, leading: bool) -> None:
        self._drops = leading  # the white space at the beginning
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """The text that can be emitted now."""
        body = text.rstrip(_WHITE_SPACE)
        if not body:
            if text and not self._drops:
                self._space.append(text)
            return ""
        if self._drops:
            head, self._drops = body.lstrip(_WHITE_SPACE), False
        else:
            head = self.rest() + body
        self._space.append(text[len(body) :])
        return head

    def drop(self) -> None:
        """Forget the white space kept back."""
        self._space.clear()

    def rest(self) -> str:
        """The white space kept back."""
        space = "".join(self._space)
        self._space.clear()
        return space


def _ignore(piece: str) -> None:
    """Ignore a call beyond the limit."""
