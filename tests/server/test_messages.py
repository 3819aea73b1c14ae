"""/v1/messages over HTTP, with an engine that says what it is told to."""

import json
from typing import Any

import pytest

from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.server.in_process import Answer, Server, saying

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
FORECAST = {
    "name": "forecast",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>\n{"name": "forecast", "arguments": {"place": "Rome"}}\n</tool_call>'
THOUGHTFUL = "<think>\nhm\n</think>\nWell. " + CALL


def ask(server: Server, *messages: dict[str, Any], **fields: Any) -> Answer:
    asked = list(messages) or [{"role": "user", "content": "Hi"}]
    return server.post(URL, {"max_tokens": 200, "messages": asked, **fields})


def answer(server: Server, *messages: dict[str, Any], **fields: Any) -> Any:
    found = ask(server, *messages, **fields)
    assert found.status == 200, found.body
    return found.json


def events_of(found: Answer) -> list[dict[str, Any]]:
    """The stream's events, whose names are those of their data."""
    events = []
    for frame in found.frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """As a client puts a message together."""
    message: dict[str, Any] = events[0]["message"]
    for event in events:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
                partial = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    partial += delta["partial_json"]
                else:
                    block[kind] += delta[kind]
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(partial or "{}")
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def test_an_answer() -> None:
    message = answer(saying())
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert usage["input_tokens"] > 0
    assert usage["output_tokens"] > 0
    assert message == {
        "type": "message", "role": "assistant", "model": "quire-tiny", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": "Hello!"}],
    }  # fmt: skip


@pytest.mark.parametrize(("reply", "num_blocks"), [("Hello!", 1), (CALL, 1), (THOUGHTFUL, 3), ("", 0)])
def test_a_stream_folded_is_the_whole_answer(reply: str, num_blocks: int) -> None:
    formats = {"tool_format": TOOL_FORMATS["hermes"], "reasoning_format": REASONING_FORMATS["think"]}
    server = saying(reply, **formats)
    answer(server, tools=[FORECAST])  # now the cache holds the prompt
    whole = answer(server, tools=[FORECAST])
    events = events_of(ask(server, tools=[FORECAST], stream=True))
    assert (events[0]["type"], events[-2]["type"], events[-1]["type"]) == (
        "message_start", "message_delta", "message_stop",
    )  # fmt: skip
    start = events[0]["message"]["usage"]
    assert start["input_tokens"] + start["cache_read_input_tokens"] > 0
    stream = folded(events)
    assert len(whole["content"]) == num_blocks
    for message in (whole, stream):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert stream == whole


def test_a_call_and_its_result_go_on() -> None:
    server = saying(CALL, tool_format=TOOL_FORMATS["hermes"])
    first = answer(server, tools=[FORECAST])
    (use,) = first["content"]
    assert (first["stop_reason"], use["name"], use["input"]) == ("tool_use", "forecast", {"place": "Rome"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sun"}
    asked = [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    assert answer(server, *asked, tools=[FORECAST])["stop_reason"] == "tool_use"


def test_why_an_answer_ends() -> None:
    server = saying("one two three")
    assert answer(server, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = answer(server, stop_sequences=["two", "never"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"] == [{"type": "text", "text": "one "}]


def test_the_assistants_last_words_are_gone_on_with() -> None:
    server = saying()
    asked = {"role": "user", "content": "Hi"}
    alone = server.post(COUNT, {"messages": [asked]}).json["input_tokens"]
    begun = server.post(COUNT, {"messages": [asked, {"role": "assistant", "content": "The answer is"}]}).json
    words = len(server.llm.tokenizer.encode("The answer is", False))
    assert begun["input_tokens"] == alone + words
    assert answer(server, asked, {"role": "assistant", "content": "The answer is"})["content"][0]["text"] == "Hello!"


@pytest.mark.parametrize("fields", [{}, {"system": "Be terse."}, {"tools": [FORECAST]}])
def test_tokens_are_counted_as_they_are_used(fields: dict[str, Any]) -> None:
    server = saying()
    asked = [{"role": "user", "content": "How many?"}]
    counted = server.post(COUNT, {"model": "quire-tiny", "messages": asked, **fields}).json
    usage = answer(server, *asked, **fields)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_prompt_in_the_cache_is_distinguished() -> None:
    server = saying()
    asked = {"role": "user", "content": "word " * 40}
    first, second = (answer(server, asked)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0
    assert second["cache_read_input_tokens"] + second["input_tokens"] == first["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [FORECAST], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["a"] * 5000}, "stop_sequences"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(fields: dict[str, Any], word: str, stream: bool) -> None:
    found = ask(saying(), stream=stream, **fields)
    assert found.status == 400, found.body
    assert found.json["type"] == "error"
    assert found.json["error"]["type"] == "invalid_request_error"
    assert word in found.json["error"]["message"]
    assert found.json["request_id"] == found.headers["request-id"] == found.headers["x-request-id"]


def test_a_model_that_is_not_served_is_not_found() -> None:
    for path in (URL, COUNT):
        found = saying().post(path, {"model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]})
        assert (found.status, found.json["error"]["type"]) == (404, "not_found_error")


def test_headers_of_anthropics_clients_are_accepted() -> None:
    headers = {"x-api-key": "x", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    found = saying().post(URL, body, headers=headers)
    assert found.status == 200
    assert "x-quire-warning" not in found.headers
