"""Converts the events of a chat to the parts of Ollama's answers."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from quire.server.api.chat import events as chat
from quire.server.api.ollama import protocol as api
from quire.server.api.shared.fields import Timings, TokenLogprob, Usage
from quire.server.api.tools.json_text import arguments_of


@dataclass(slots=True)
class Part:
    """What an answer, or a part of one, contains."""

    content: str = ""
    thinking: str = ""
    calls: list[api.Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class AnswerBuilder:
    """Makes the objects of one answer. Tool calls are sent when they are complete: their arguments are objects."""

    def __init__(self, model: str, start_s: float, load_s: float, *, is_chat: bool) -> None:
        """`start_s` is when the request arrived, of time.monotonic(); `load_s` how long it waited for the model."""
        self._model = model
        self._start_s = start_s
        self._load_s = load_s
        self._is_chat = is_chat
        self._calls: dict[int, tuple[str, str, list[str]]] = {}
        self._finish_reason = "stop"
        self._usage = chat.UsageEvent(Usage.of(0, 0, 0))
        self._token_ids: list[int] = []

    async def stream(self, events: AsyncGenerator[chat.ChatEvent, None]) -> AsyncGenerator[api.Answer, None]:
        """Yield the parts as they come; the last one is done."""
        async with aclosing(events):
            async for event in events:
                part = self._part(event)
                if part != Part():
                    yield self._object([part])
        yield self.done()

    async def fold(self, events: AsyncGenerator[chat.ChatEvent, None]) -> api.Answer:
        """The whole answer."""
        async with aclosing(events):
            parts = [self._part(event) async for event in events]
        return self.done(parts)

    def done(self, parts: Sequence[Part] = (), reason: str | None = None) -> api.Answer:
        """The last object; with a `reason` that of a request that generated nothing."""
        answer = self._object(parts)
        answer.done, answer.done_reason = True, reason or self._finish_reason
        if reason is not None:
            return answer
        timings = self._usage.timings or Timings(None, None, None, None)
        answer.total_duration = _ns(time.monotonic() - self._start_s)
        answer.load_duration = _ns(self._load_s)
        answer.prompt_eval_count, answer.prompt_eval_duration = self._usage.usage.prompt_tokens, _ns(timings.prefill_s)
        answer.eval_count, answer.eval_duration = self._usage.usage.completion_tokens, _ns(timings.decode_s)
        if isinstance(answer, api.GenerateAnswer):
            answer.context = self._token_ids
        return answer

    def _part(self, event: chat.ChatEvent) -> Part:
        match event:
            case chat.PromptEvent():
                self._token_ids += event.token_ids or []
            case chat.ContentDelta():
                self._token_ids += event.token_ids or []
                return Part(event.text, logprobs=event.logprobs or [])
            case chat.ReasoningDelta():
                return Part(thinking=event.text)
            case chat.ToolCallDelta():
                call = self._calls.setdefault(event.tool_index, (event.id or "", event.name or "", []))
                call[2].append(event.arguments)
            case chat.ChoiceFinished():
                self._finish_reason = "length" if event.finish_reason == "length" else "stop"
                return Part(calls=[_call(*call) for call in self._calls.values()])
            case chat.UsageEvent():
                self._usage = event
        return Part()

    def _object(self, parts: Sequence[Part]) -> api.Answer:
        content, thinking = "".join([p.content for p in parts]), "".join([p.thinking for p in parts]) or None
        logprobs = [logprob for part in parts for logprob in part.logprobs] or None
        common: dict[str, Any] = {
            "model": self._model, "created_at": rfc3339(time.time()), "done": False, "logprobs": logprobs,
        }  # fmt: skip
        if not self._is_chat:
            return api.GenerateAnswer(response=content, thinking=thinking, **common)
        calls = [call for part in parts for call in part.calls] or None
        message = api.OutputMessage(role="assistant", content=content, thinking=thinking, tool_calls=calls)
        return api.ChatAnswer(message=message, **common)


def rfc3339(seconds: float) -> str:
    """A time as clients of Ollama expect it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _call(call_id: str, name: str, arguments: list[str]) -> api.Call:
    function = api.CalledFunction(name=name, arguments=arguments_of("".join(arguments)))
    return api.Call(id=call_id, function=function)


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)
