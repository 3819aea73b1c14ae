"""Calls that `tool_choice` forces and the token limit cuts off."""

from typing import Any

import pytest

from tests.server.in_process import saying
from tests.server.responses import events_of

CALLS = '[ {"name": "get", "parameters": {"a": 1}}, {"name": "get", "parameters": {"a": 2}}]'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}],
    "tool_choice": "required",
}
ANTHROPIC = {
    "messages": MESSAGES,
    "tools": [{"name": "get", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"},
}


def num_tokens(text: str) -> int:
    return len(saying().llm.tokenizer.encode(text))


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('[ {"name": "get", "parameters"', []),
        ('[ {"name": "get", "parameters": {"a":', ['{"a":']),
        ('[ {"name": "get", "parameters": {"a": 1}}, {"name": "get"', ['{"a": 1}']),
    ],
)
def test_a_call_cut_off_before_its_arguments_is_left_out(written: str, arguments: list[str]) -> None:
    limit = num_tokens(written)
    (choice,) = saying(CALLS).post("/v1/chat/completions", CHAT | {"max_tokens": limit}).json["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == arguments
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
    streamed = saying(CALLS).post("/v1/chat/completions", CHAT | {"max_tokens": limit, "stream": True}).events
    deltas = [choice for event in streamed for choice in event["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == ""
    assert deltas[-1]["finish_reason"] == "length"


def test_nor_is_it_a_block_of_text_of_a_message() -> None:
    request: dict[str, Any] = ANTHROPIC | {"max_tokens": num_tokens('[ {"name": "get", "parameters"')}
    message = saying(CALLS).post("/v1/messages", request).json
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    events = events_of(saying(CALLS).post("/v1/messages", request | {"stream": True}))
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
