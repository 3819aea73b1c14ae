"""Incremental parser that splits a model's output into reasoning, content and tool calls."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from quire.server.api.chat.events import ContentDelta
from quire.server.api.tools.call_reader import CallReader
from quire.server.api.tools.call_styles import Schemas
from quire.server.api.tools.channels import ChannelReader
from quire.server.api.tools.formats import ReasoningFormat, ToolFormat
from quire.server.api.tools.json_text import SPACE
from quire.server.api.tools.parsed import Parsed, ParsedList, merged
from quire.server.api.tools.reader import Reader, Reading


@dataclass(frozen=True, slots=True)
class ForcedTools:
    """The output is generated with a grammar that permits only calls."""

    name: str | None = None
    """Name of the function whose arguments are the whole output. None: the output is an array of calls."""


def new_call_id() -> str:
    """An id for a call that cannot be guessed."""
    return "call_" + secrets.token_hex(12)


class OutputParser:
    """Parses the output of one choice. It accepts any text, takes linear time, and never raises an exception.

    The parts found, put together, do not depend on where the text is split. Malformed calls are content, but the
    beginning of a forced call that is cut off before its arguments is left out. Text is held back only while it could
    still become a tag or a call.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        forced: ForcedTools | None = None,
        schemas: Schemas | None = None,
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`index` is the index of the choice.

        With `forced` the other formats are ignored, because the grammar excludes them. `schemas` are those of the
        functions' arguments, by their names; formats that do not write JSON need them. Calls beyond `max_calls` are
        left out. Without any format all text is content, and is passed on unchanged.
        """
        self._index = index
        self._reader = Reader()
        self._found = ParsedList(index, new_id, max_calls)
        self._calls = CallReader(self._reader, self._found, schemas or {})
        self._is_plain = reasoning is None and tools is None and forced is None
        self._answer_end = ""  # the tag that ends the answer, where the answer has tags
        if forced is not None:
            self._reading = self._read_forced(forced)
        elif any(form is not None and form.has_channels for form in (reasoning, tools)):
            self._reader.push(reasoning.header if reasoning is not None else "")
            self._reading = self._read_channels(reasoning, tools)
        else:
            self._reading = self._read(reasoning, tools)

    def feed(self, text: str) -> list[Parsed]:
        """Add text; returns the parts that are certain now."""
        if self._is_plain:
            return [ContentDelta(self._index, text)] if text else []
        self._reader.push(text)
        return self._go_on()

    def finish(self) -> list[Parsed]:
        """The output has ended; returns the remaining parts. No text may be fed afterwards."""
        if self._is_plain:
            return []
        self._reader.end()
        return self._go_on()

    def _go_on(self) -> list[Parsed]:
        next(self._reading, None)
        return merged(self._found.take())

    def _read(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Reading[None]:
        if reasoning is not None:
            yield from self._read_reasoning(reasoning)
        if tools is not None and tools.begins_bare:
            yield from self._read_calls(tools, "")
        while tag := (yield from self._next_tag(tools)):
            if tools is None or tag == self._answer_end:
                self._answer_end = ""
                self._found.answer_began()
            else:
                yield from self._read_calls(tools, tag)
        yield from self._read_content()

    def _next_tag(self, tools: ToolFormat | None) -> Reading[str]:
        """Read up to the end of the next tag. Returns "" if there is none, or not where calls may be."""
        if tools is None or not tools.excludes_content:
            tags = [*(tools.tags if tools else ()), *filter(None, [self._answer_end])]
            return (yield from self._reader.until(tags, self._found.content))
        yield from self._reader.run(SPACE, self._found.content)
        return "" if tools.begins_bare else (yield from self._reader.match_any(tools.tags))

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        self._reader.hold()
        yield from self._reader.run(SPACE)
        has_tag = yield from self._reader.match_any(reasoning.starts)
        if has_tag or reasoning.is_open:
            self._reader.release()
            yield from self._reader.until(reasoning.ends, self._found.reasoning)
            self._found.answer_began()
            self._reader.hold()
            yield from self._reader.run(SPACE)
        before = self._reader.release()
        if reasoning.in_answer or (yield from self._reader.match_any(reasoning.answer[:1])):
            self._answer_end = reasoning.answer[1]
            self._found.answer_began()
        else:
            self._found.content(before)

    def _read_channels(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Reading[None]:
        channels = ChannelReader(
            self._calls, self._found, has_reasoning=reasoning is not None, has_calls=tools is not None
        )
        self._reader.hold()
        yield from channels.read(excludes_content=tools is not None and tools.excludes_content)
        yield from self._read_content()

    def _read_calls(self, tools: ToolFormat, tag: str) -> Reading[None]:
        self._reader.hold(tag)
        yield from tools.style.read(self._calls, tag)
        self._found.content(self._reader.release())

    def _read_forced(self, forced: ForcedTools) -> Reading[None]:
        self._reader.hold()
        yield from self._reader.run(SPACE)
        if forced.name is None:
            yield from self._calls.calls()
        else:
            yield from self._calls.arguments_of(forced.name)
        unread = self._reader.release()
        if (yield from self._reader.ahead()):  # otherwise the output was cut off before a call's arguments
            self._found.content(unread)
        yield from self._read_content()

    def _read_content(self) -> Reading[None]:
        yield from self._reader.rest(self._found.content)
        self._found.end()
