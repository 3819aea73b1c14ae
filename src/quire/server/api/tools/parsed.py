"""The parts that a parser finds in a model's output, as the events of a chat."""

from collections.abc import Callable
from itertools import groupby
from typing import TypeAlias

from msgspec.structs import replace

from quire.server.api.chat.events import ContentDelta, ReasoningDelta, ToolCallDelta

_WHITE_SPACE = " \t\r\n"

Parsed: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class ParsedList:
    """Gathers the parts of one choice, and decides about the white space between them.

    White space beside reasoning and beside calls belongs to their format and is left out. White space between a call
    and the content that follows it is kept.
    """

    def __init__(self, index: int, new_id: Callable[[], str], max_calls: int | None) -> None:
        """`index` is the index of the choice."""
        self._index = index
        self._new_id = new_id
        self._max_calls = max_calls
        self._found: list[Parsed] = []
        self._content = _Trimmer(leading=False)
        self._reasoning = _Trimmer(leading=True)
        self._num_calls = 0
        self._is_behind_call = False

    def take(self) -> list[Parsed]:
        """Return the parts found since the last call."""
        found, self._found = self._found, []
        return found

    def content(self, text: str) -> None:
        """Add to the answer."""
        if text := self._content.add(text):
            self._found.append(ContentDelta(self._index, text))
            self._is_behind_call = False

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        if text := self._reasoning.add(text):
            self._found.append(ReasoningDelta(self._index, text))

    def answer_began(self) -> None:
        """Content begins or goes on after a tag; white space beside it is dropped."""
        self._content = _Trimmer(leading=True)

    def call_began(self, name: str, arguments: str) -> Callable[[str], None]:
        """A new call. Returns the sink of its further arguments."""
        self._content.drop()
        self._is_behind_call = True
        index, self._num_calls = self._num_calls, self._num_calls + 1
        if self._max_calls is not None and index >= self._max_calls:
            return _ignore
        self._found.append(ToolCallDelta(self._index, index, self._new_id(), name, arguments))
        return lambda piece: self._found.append(ToolCallDelta(self._index, index, None, None, piece))

    def end(self) -> None:
        """The output has ended."""
        if not self._is_behind_call and (text := self._content.rest()):
            self._found.append(ContentDelta(self._index, text))


def merged(found: list[Parsed]) -> list[Parsed]:
    """Join neighbours of the same kind."""
    return [_joined(list(group)) for _, group in groupby(found, _kind)]


def _kind(parsed: Parsed) -> int | type:
    return parsed.tool_index if isinstance(parsed, ToolCallDelta) else type(parsed)


def _joined(group: list[Parsed]) -> Parsed:
    first = group[0]
    if len(group) == 1:
        return first
    if isinstance(first, ToolCallDelta):
        return replace(first, arguments="".join(piece.arguments for piece in group if isinstance(piece, ToolCallDelta)))
    return replace(first, text="".join(piece.text for piece in group if not isinstance(piece, ToolCallDelta)))


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
