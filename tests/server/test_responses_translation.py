"""Responses to chat and back, on conversations and events made by hand."""

from collections.abc import Iterable
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.api.chat.events import (
    ChatEvent,
    ChoiceFinished,
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.responses.input import chat_request, check_request, is_response_id, new_id, own_items
from quire.server.api.responses.protocol import Reasoning, Response, ResponseError, ResponsesRequest, TextConfig
from quire.server.api.responses.stream import Event, ResponseBuilder
from quire.server.api.shared.fields import TokenLogprob
from quire.server.http.errors import ApiError
from tests.server.chats import used

LOGPROB = TokenLogprob("a", -0.5, [97], [])
FORECAST = {"type": "function", "name": "forecast", "parameters": {"type": "object"}}


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"input": "Hi", **fields}, ResponsesRequest)


def as_chat(**fields: Any) -> dict[str, Any]:
    """The body of the chat request, which must be one that chat takes."""
    body = chat_request(request(**fields), own_items(request(**fields)))
    msgspec.convert(body, ChatCompletionRequest)
    return body


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = as_chat(input=list(items), instructions=instructions)["messages"]
    return found


def call(call_id: str, name: str = "forecast", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_a_text_is_a_message_of_the_user() -> None:
    assert as_chat()["messages"] == [{"role": "user", "content": "Hi"}]


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


def test_instructions_and_opening_system_messages_are_one_system_message() -> None:
    opening = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}]
    later = [{"role": "user", "content": "d"}, {"role": "developer", "content": "e"}]
    assert messages(*opening, *later, instructions="a") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
    ]


def test_calls_thoughts_and_text_of_one_turn_are_one_message() -> None:
    thoughts = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]}
    found = messages(
        {"role": "user", "content": "Weather?"}, thoughts, said, call("c1"), call("c2"),
        output("c1", "sun"), output("c2", [{"type": "input_text", "text": "rain"}]),
    )  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "forecast", "arguments": "{}"}} for name in ("c1", "c2")
    ]
    assert found[1:] == [
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "forecast", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "name": "forecast", "content": "rain"},
    ]


def test_thoughts_that_were_summarized_are_read_and_those_without_an_answer_are_not() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    answered = messages(summary, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"})
    assert answered[0]["reasoning_content"] == "short"
    left = messages(summary, {"role": "user", "content": "y"}, {"role": "assistant", "content": "x"})
    assert [sorted(message) for message in left] == [["content", "role"]] * 2


def test_thoughts_before_a_call_are_part_of_its_message() -> None:
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in "ab"]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in "cd"]}
    (found,) = messages(*thoughts, summary, call("c1"))
    assert found["reasoning_content"] == "a\nb\nc\nd"
    assert [each["id"] for each in found["tool_calls"]] == ["c1"]


def test_a_refusal_is_read_as_the_text_of_the_assistant() -> None:
    parts = [{"type": "output_text", "text": "Hm."}, {"type": "refusal", "refusal": "No."}]
    assert messages({"role": "assistant", "content": parts}) == [{"role": "assistant", "content": "Hm.\nNo."}]


@pytest.mark.parametrize("items", [[], [{"type": "reasoning", "summary": []}]])
def test_a_conversation_without_messages_is_refused(items: list[dict[str, Any]]) -> None:
    with pytest.raises(ApiError) as refused:
        messages(*items)
    assert (refused.value.param, refused.value.message) == ("input", "input: contains no messages")


@pytest.mark.parametrize(
    ("item", "param", "reason"),
    [
        ({"role": "user"}, "input[0].content", "is missing: items of type 'message' require it"),
        ({"content": "x"}, "input[0].role", "is missing"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id",
         "is missing: items of type 'function_call' require it"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output", "is missing"),
        (output("unknown", "x"), "input", "contains an output of the call 'unknown', but no such call precedes it"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0]",
         "images and files are not supported: the model reads text only"),
        ({"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}, "input[0].content[0]",
         "is not allowed in an item of type 'message'"),
    ],
)  # fmt: skip
def test_an_item_that_says_too_little_or_too_much_is_refused_by_its_place(
    item: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(ApiError) as refused:
        messages(item)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: {reason}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "web_search"}]),
        ("input", [{"type": "web_search_call", "id": "x"}]),
        ("max_output_tokens", 0),
        ("top_logprobs", 21),
        ("metadata", {str(i): "" for i in range(17)}),
        ("truncation", "sometimes"),
        ("text", {"format": {"type": "json_schema"}}),
    ],
)
def test_what_the_types_do_not_allow_is_refused(field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        request(**{field: value})


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"conversation": "c"}, "conversation", "not supported: send the items in 'input', or set"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported: send the items in 'input', or set"),
        ({"truncation": "auto"}, "truncation", "'auto' is not supported; use 'disabled'"),
        ({"background": True, "store": False}, "background", "requires store=true"),
        ({"include": ["file_search_call.results"]}, "include",
         "'file_search_call.results' is not supported; use message.output_text.logprobs, reasoning.encrypted_content"),
        ({"top_logprobs": 2}, "top_logprobs", "requires 'message.output_text.logprobs' in 'include'"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_request(request(**fields))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: {reason}")


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True}, {"store": False}, {"truncation": "disabled"},
        {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2},
    ],
)  # fmt: skip
def test_what_is_served_is_not_refused(fields: dict[str, Any]) -> None:
    check_request(request(**fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
        ({"tools": [], "tool_choice": "required"}, {"tool_choice": "required"}),
        ({"reasoning": {"effort": "max"}}, {"reasoning_effort": "max"}),
    ],
)
def test_a_field_alone_takes_the_name_of_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    body = as_chat(**fields, parallel_tool_calls=None)
    del body["messages"]
    assert body == expected


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_a_choice_among_tools_is_kept(choice: str) -> None:
    assert as_chat(tools=[FORECAST], tool_choice=choice)["tool_choice"] == choice


def test_allowed_tools_take_the_form_of_chat() -> None:
    name = {"type": "function", "name": "forecast"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [name]}
    assert as_chat(tools=[FORECAST], tool_choice=choice)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "forecast"}}]},
    }


def test_fields_take_the_names_of_chat() -> None:
    body = as_chat(
        temperature=0.5, top_p=0.9, max_output_tokens=7, parallel_tool_calls=False, user="u", seed=3,
        include=["message.output_text.logprobs"], top_logprobs=2, reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        tools=[FORECAST], tool_choice={"type": "function", "name": "forecast"},
    )  # fmt: skip
    del body["messages"]
    assert body == {
        "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7, "parallel_tool_calls": False, "user": "u",
        "seed": 3, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "tools": [{"type": "function", "function": {"name": "forecast", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "forecast"}},
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"format": {"type": "any_text"}},
        {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]},
    ],
)
def test_structural_tags_are_those_of_chat(given: dict[str, Any]) -> None:
    given = {"type": "structural_tag", **given}
    assert as_chat(text={"format": given})["response_format"] == given


def test_items_are_listed_in_full() -> None:
    (listed,) = own_items(request(input="Hi"))
    assert listed.pop("id").startswith("msg_")
    content = [{"type": "input_text", "text": "Hi"}]
    assert listed == {"type": "message", "status": "completed", "role": "user", "content": content}
    (kept,) = own_items(request(input=[{"role": "assistant", "content": "x", "id": "mine"}]))
    assert (kept["id"], kept["content"]) == ("mine", [{"type": "output_text", "text": "x"}])


def test_ids_of_responses_are_known_by_their_form() -> None:
    assert is_response_id(new_id("resp"))
    assert not any(map(is_response_id, ("resp_", "resp_1", "msg_" + "0" * 32, new_id("resp") + "\n", "\ud800")))


def run(events: Iterable[ChatEvent]) -> tuple[Response, list[Event]]:
    """The response and its stream, as JSON would have it."""
    numbers = count()
    response = Response(id="resp_1", created_at=1, model="m", text=TextConfig(), reasoning=Reasoning())
    builder = ResponseBuilder(response, lambda prefix: f"{prefix}_{next(numbers)}")
    sent = builder.start()
    for event in events:
        sent += builder.feed(event)
    sent += builder.complete(2, 3)
    sent.append(builder.last())
    return builder.response, msgspec.json.decode(msgspec.json.encode(sent))


def kinds(events: Iterable[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


END = [ChoiceFinished(0, "stop", None), used(10, 5, 4)]


def test_the_events_of_a_text_come_in_order() -> None:
    response, events = run([ContentDelta(0, "Hel"), ContentDelta(0, "lo"), *END])
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == events[2]["item"]["content"] == []
    assert events[6]["text"] == "Hello"
    assert events[9]["response"] == msgspec.to_builtins(response)
    assert response.usage is not None
    assert msgspec.to_builtins(response.usage) == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0}, "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 15,
    }  # fmt: skip


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    events = [
        ReasoningDelta(0, "hm"), ContentDelta(0, "Let me look."), ToolCallDelta(0, 0, "c1", "forecast", ""),
        ToolCallDelta(0, 0, None, None, '{"a"'), ToolCallDelta(0, 0, None, None, ":1}"),
        ToolCallDelta(0, 1, "c2", "forecast", "{}"), ChoiceFinished(0, "tool_calls", None), used(1, 1, 0),
    ]  # fmt: skip
    response, sent = run(events)
    assert kinds(sent)[2:-1] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    found = [msgspec.to_builtins(item) for item in response.output]
    assert [item["type"] for item in found] == ["reasoning", "message", "function_call", "function_call"]
    assert found[2]["arguments"] == '{"a":1}'
    assert [item["call_id"] for item in found[2:]] == ["c1", "c2"]
    assert {item["status"] for item in found} == {"completed"}


def test_a_text_that_meets_the_limit_is_incomplete() -> None:
    response, events = run([ContentDelta(0, "Hel"), ChoiceFinished(0, "length", None), used(1, 1, 0)])
    assert kinds(events)[-1] == response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    response, events = run(END)
    assert response.output[0].content[0].text == ""  # type: ignore[union-attr]
    assert kinds(events)[2:4] == ["output_item.added", "content_part.added"]


def test_logprobs_without_text_come_with_the_next_text() -> None:
    response, events = run([ContentDelta(0, "", [LOGPROB]), ContentDelta(0, "ab", [LOGPROB]), *END])
    (delta,) = [event for event in events if event["type"].endswith("text.delta")]
    assert len(delta["logprobs"]) == 2
    assert len(response.output[0].content[0].logprobs) == 2  # type: ignore[union-attr,arg-type]


def test_logprobs_behind_the_text_come_with_its_end() -> None:
    """Such as that of a token that stops the output, which may or may not come in a step of its own."""
    for chat in ([ContentDelta(0, "ab", [LOGPROB]), ContentDelta(0, "", [LOGPROB])], [ContentDelta(0, "", [LOGPROB])]):
        response, events = run([*chat, *END])
        deltas = [event for event in events if event["type"].endswith("text.delta")]
        assert sum(len(delta["logprobs"]) for delta in deltas) == len(chat)
        (done,) = [event for event in events if event["type"].endswith("text.done")]
        assert len(done["logprobs"]) == len(response.output[0].content[0].logprobs) == len(chat)  # type: ignore[union-attr,arg-type]


def test_what_fails_or_is_cancelled_keeps_what_there_is() -> None:
    for status, last in (("failed", "failed"), ("cancelled", "incomplete")):
        response = Response(id="resp_1", created_at=1, model="m", text=TextConfig(), reasoning=Reasoning())
        builder = ResponseBuilder(response, new_id)
        builder.feed(ContentDelta(0, "Hel"))
        closed = builder.end(status, ResponseError("code", "why") if status == "failed" else None)  # type: ignore[arg-type]
        assert kinds(closed)[-1] == "output_item.done"
        assert kinds([builder.last()]) == [last]
        assert (response.status, response.output[0].status) == (status, "incomplete")


CHAT_EVENTS = st.lists(
    st.one_of(
        st.builds(ContentDelta, st.just(0), st.text(max_size=3), st.none() | st.just([LOGPROB])),
        st.builds(ReasoningDelta, st.just(0), st.text(max_size=3)),
        st.builds(ToolCallDelta, st.just(0), st.integers(0, 2), st.just("c"), st.just("f"), st.text(max_size=3)),
    ),
    max_size=12,
)


@given(CHAT_EVENTS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_stream_says_what_the_response_says(chat: list[ChatEvent], reason: Any) -> None:
    response, events = run([*chat, ChoiceFinished(0, reason, None), used(3, 2, 1)])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    whole = msgspec.to_builtins(response)
    assert events[-1]["response"] == whole
    assert done == whole["output"]
    for item, index in zip(done, count(), strict=False):
        mine = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in mine} <= {index}
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert sum(len(each.text) for each in chat if isinstance(each, ContentDelta)) == sum(
        len(item["content"][0]["text"]) for item in done if item["type"] == "message"
    )
