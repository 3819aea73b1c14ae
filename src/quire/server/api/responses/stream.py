"""Converts the events of a chat to a response object and the events of its stream. No clock, no I/O.

Each item of the output has these events: `output_item.added`; for text, `content_part.added`; the deltas; then the end
of the text, of the part and of the item. Events are plain dicts, which never change once they are made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.api.chat import events as chat
from quire.server.api.responses import protocol as api
from quire.server.api.shared.fields import Usage

Event = dict[str, Any]
TEXT, REASONING, CALL = "output_text", "reasoning_text", "function_call_arguments"
"""The kinds of items, named after the type of their deltas."""
_PREFIXES = {TEXT: "msg", REASONING: "rs", CALL: "fc"}


@dataclass(kw_only=True, slots=True)
class _Open:
    """The item that deltas go to."""

    kind: str
    id: str
    output_index: int
    tool_index: int | None = None
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponseBuilder:
    """Builds `response`, which grows by each item that ends. Call `start`, `feed` for each event, `complete` or `end`,
    then `last`: each returns the events to send."""

    def __init__(self, response: api.Response, new_id: Callable[[str], str]) -> None:
        """`new_id` makes the id of an item from a prefix."""
        self.response = response
        self._new_id = new_id
        self._open: _Open | None = None
        self._finish: chat.ChoiceFinished | None = None
        self._usage: Usage | None = None
        self._pending_logprobs: list[Any] = []
        self._num_events = 0

    def start(self) -> list[Event]:
        """The events that begin the stream."""
        return [self._response_event("created"), self._response_event("in_progress")]

    def feed(self, event: chat.ChatEvent) -> list[Event]:
        """The stream's events for one event of the chat."""
        match event:
            case chat.ContentDelta(text=text, logprobs=logprobs):
                self._pending_logprobs += logprobs or ()
                return self._text_delta(TEXT, text) if text else []
            case chat.ReasoningDelta(text=text):
                return self._text_delta(REASONING, text) if text else []
            case chat.ToolCallDelta():
                return self._call_delta(event)
            case chat.ChoiceFinished():
                self._finish = event
            case chat.UsageEvent():
                self._usage = event.usage
        return []

    @property
    def reasoning_text(self) -> str:
        """The reasoning so far."""
        done = [item.content[0].text for item in self.response.output if isinstance(item, api.ReasoningItem)]
        return "".join(done) + (self._open.text if self._open is not None and self._open.kind == REASONING else "")

    def complete(self, now: int, num_reasoning_tokens: int) -> list[Event]:
        """The chat has ended normally or at the token limit. An output without items becomes an empty text."""
        events = [] if self.response.output or self._open is not None else self._open_item(TEXT)
        if self._usage is not None:
            self.response.usage = _usage(self._usage, num_reasoning_tokens)
        if self._finish is not None and self._finish.finish_reason == "length":
            self.response.incomplete_details = api.IncompleteDetails("max_output_tokens")
            return events + self.end("incomplete")
        self.response.completed_at = now
        return events + self.end("completed")

    def end(self, status: api.Status, error: api.ResponseError | None = None) -> list[Event]:
        """Close the open item and set this status. It may be called again if storing the response fails."""
        events = self._close("completed" if status == "completed" else "incomplete")
        self.response.status = status
        self.response.error = error
        return events

    def last(self) -> Event:
        """The event that ends the stream. OpenAI has none for a cancelled response: `incomplete`, with its status."""
        return self._response_event("incomplete" if self.response.status == "cancelled" else self.response.status)

    def _text_delta(self, kind: str, text: str) -> list[Event]:
        events = [] if self._open is not None and self._open.kind == kind else self._open_item(kind)
        opened = self._opened()
        opened.texts.append(text)
        more = {}
        if kind == TEXT:
            more["logprobs"] = self._pending_logprobs
            opened.logprobs += self._pending_logprobs
            self._pending_logprobs = []
        return [*events, self._event(f"response.{kind}.delta", opened, content_index=0, delta=text, **more)]

    def _call_delta(self, delta: chat.ToolCallDelta) -> list[Event]:
        events = []
        if self._open is None or self._open.tool_index != delta.tool_index:
            call = {"tool_index": delta.tool_index, "name": delta.name or "", "call_id": delta.id or ""}
            events = self._open_item(CALL, **call)
        opened = self._opened()
        if delta.arguments:
            opened.texts.append(delta.arguments)
            events.append(self._event(f"response.{CALL}.delta", opened, delta=delta.arguments))
        return events

    def _opened(self) -> _Open:
        if self._open is None:
            raise RuntimeError("no item is open")
        return self._open

    def _open_item(self, kind: str, **more: Any) -> list[Event]:
        events = self._close("completed")
        index = len(self.response.output)
        opened = self._open = _Open(kind=kind, id=self._new_id(_PREFIXES[kind]), output_index=index, **more)
        item = _item(opened, "in_progress")
        if not isinstance(item, api.FunctionCall):
            item.content = []
        events.append(self._item_event("added", opened, item))
        if kind != CALL:
            events.append(self._part_event("added", opened))
        return events

    def _close(self, status: api.ItemStatus) -> list[Event]:
        """Close the open item: send the events for its text, its part and itself, and add it to the response."""
        if self._open is None:
            return []
        events = self._text_delta(TEXT, "") if self._open.kind == TEXT and self._pending_logprobs else []
        opened, self._open = self._open, None
        if opened.kind == CALL:
            done: Event = {"arguments": opened.text, "name": opened.name}
            events = [self._event(f"response.{CALL}.done", opened, **done)]
        else:
            more = {"logprobs": opened.logprobs} if opened.kind == TEXT else {}
            done = {"content_index": 0, "text": opened.text, **more}
            events += [self._event(f"response.{opened.kind}.done", opened, **done), self._part_event("done", opened)]
        item = _item(opened, status)
        self.response.output.append(item)
        return [*events, self._item_event("done", opened, item)]

    def _event(self, kind: str, opened: _Open, **fields: Any) -> Event:
        return self._numbered(kind, {"item_id": opened.id, "output_index": opened.output_index, **fields})

    def _part_event(self, change: str, opened: _Open) -> Event:
        return self._event(f"response.content_part.{change}", opened, content_index=0, part=_part(opened))

    def _item_event(self, change: str, opened: _Open, item: api.OutputItem) -> Event:
        return self._numbered(f"response.output_item.{change}", {"output_index": opened.output_index, "item": item})

    def _response_event(self, change: str) -> Event:
        now = msgspec.structs.replace(self.response, output=list(self.response.output))
        return self._numbered(f"response.{change}", {"response": now})

    def _numbered(self, kind: str, fields: Event) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _part(opened: _Open) -> api.OutputText | api.ReasoningText:
    if opened.kind == REASONING:
        return api.ReasoningText(opened.text)
    return api.OutputText(opened.text, logprobs=list(opened.logprobs))


def _item(opened: _Open, status: api.ItemStatus) -> api.OutputItem:
    match opened.kind:
        case "reasoning_text":
            return api.ReasoningItem(opened.id, content=[api.ReasoningText(opened.text)], status=status)
        case "output_text":
            return api.OutputMessage(
                opened.id, status, content=[api.OutputText(opened.text, logprobs=list(opened.logprobs))]
            )
    return api.FunctionCall(opened.id, opened.call_id, opened.name, opened.text, status)


def _usage(usage: Usage, num_reasoning_tokens: int) -> api.ResponseUsage:
    return api.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=api.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=api.OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
