"""Converts the events of a chat to those of Anthropic's stream and to a whole message. No I/O."""

from typing import Any

import msgspec

from quire.server.api.chat import events as chat
from quire.server.api.messages.protocol import Message, MessageUsage, StopReason, TextBlock, ThinkingBlock, ToolUseBlock
from quire.server.api.shared.fields import Usage
from quire.server.api.tools.json_text import arguments_of

Event = dict[str, Any]
_STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageBuilder:
    """Builds `message`, which grows by each block that ends. Call `feed` for each event of the chat, then `finish`:
    each returns the events to send.

    The first event contains the number of prompt tokens, so none is sent before the chat's first usage.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self.message = Message(id=message_id, model=model, usage=MessageUsage(0, 0))
        self._started = False
        self._open: tuple[str, int] | None = None
        self._block: Event = {}
        """The open block as it began."""
        self._texts: list[str] = []
        """The texts of its deltas."""
        self._usage: Usage | None = None
        self._pending: list[chat.ChatEvent] = []
        self._finish: chat.ChoiceFinished | None = None
        self._called = False

    def feed(self, event: chat.ChatEvent) -> list[Event]:
        """The stream's events for one event of the chat. None are sent before the first usage is known."""
        if isinstance(event, chat.UsageEvent):
            self._usage = event.usage
        elif self._usage is None:
            self._pending.append(event)
            return []
        pending, self._pending = self._pending, []
        return self._start() + [sent for each in (*pending, event) for sent in self._events_of(each)]

    def finish(self) -> list[Event]:
        """The chat has ended."""
        events = self._start() + self._close()
        message = self.message
        message.stop_reason, message.stop_sequence = self._stop()
        message.usage = _usage(self._usage)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        end = {"type": "message_delta", "delta": delta, "usage": message.usage}
        return [*events, end, {"type": "message_stop"}]

    def _events_of(self, event: chat.ChatEvent) -> list[Event]:
        match event:
            case chat.ContentDelta(text=text) if text:
                block: Event = {"type": "text", "text": ""}
                return self._delta(("text", 0), block, "text_delta", "text", text)
            case chat.ReasoningDelta(text=text) if text:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._delta(("thinking", 0), block, "thinking_delta", "thinking", text)
            case chat.ToolCallDelta():
                self._called = True
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                key = ("tool_use", event.tool_index)
                return self._delta(key, block, "input_json_delta", "partial_json", event.arguments)
            case chat.ChoiceFinished():
                self._finish = event
        return []

    def _start(self) -> list[Event]:
        if self._started:
            return []
        self._started = True
        message = msgspec.structs.replace(self.message, usage=_usage(self._usage), content=[])
        return [{"type": "message_start", "message": message}]

    def _delta(self, key: tuple[str, int], block: Event, kind: str, field: str, text: str) -> list[Event]:
        """Continue the block of this kind and number; close another open one first."""
        events = []
        if self._open != key:
            events = self._close()
            self._open, self._block, self._texts = key, block, []
            events.append({"type": "content_block_start", "index": len(self.message.content), "content_block": block})
        if text:
            self._texts.append(text)
            delta = {"type": kind, field: text}
            events.append({"type": "content_block_delta", "index": len(self.message.content), "delta": delta})
        return events

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        self.message.content.append(_block(self._block, "".join(self._texts)))
        return [{"type": "content_block_stop", "index": len(self.message.content) - 1}]

    def _stop(self) -> tuple[StopReason | None, str | None]:
        if self._finish is None:
            return None, None
        reason = _STOP_REASONS[self._finish.finish_reason]
        if reason == "end_turn" and self._called:  # chat reports `stop` for a call that the request named
            return "tool_use", None
        if reason == "end_turn" and isinstance(self._finish.stop_reason, str):
            return "stop_sequence", self._finish.stop_reason
        return reason, None


def _block(block: Event, text: str) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match block["type"]:
        case "text":
            return TextBlock(text)
        case "thinking":
            return ThinkingBlock(text)
    return ToolUseBlock(block["id"], block["name"], arguments_of(text))


def _usage(usage: Usage | None) -> MessageUsage:
    if usage is None:
        return MessageUsage(0, 0)
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached)
