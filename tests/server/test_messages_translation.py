"""Anthropic's messages to chat and back, on conversations and events made by hand."""

from collections.abc import Iterable
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
from quire.server.api.messages.input import chat_request, prompt_request
from quire.server.api.messages.protocol import CountTokensRequest, Message, MessagesRequest, ToolUseBlock
from quire.server.api.messages.stream import Event, MessageBuilder
from quire.server.http.errors import ApiError
from tests.server.chats import used

USE = {"type": "tool_use", "id": "t1", "name": "forecast", "input": {"place": "Rome"}}


def as_chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The body of the chat request, which must be one that chat takes."""
    body = {"max_tokens": 5, "messages": list(messages) or [{"role": "user", "content": "Hi"}], **fields}
    chat = chat_request(msgspec.convert(body, MessagesRequest))
    msgspec.convert(chat, ChatCompletionRequest)
    return chat


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def result(content: Any, use_id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use_id, "content": content}


def test_texts_and_blocks_are_messages() -> None:
    found = as_chat(
        {"role": "user", "content": "a"}, {"role": "assistant", "content": [text("b"), text("c")]},
        user(text("d"), text("e")), system=[text("s"), text("t")],
    )  # fmt: skip
    assert found["messages"] == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d\ne"},
    ]


def test_calls_and_their_results_are_messages_in_their_order() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    found = as_chat(
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [thinking, text("Let me look."), USE]},
        user(result("sun"), text("and now?")), {"role": "assistant", "content": [{"type": "redacted_thinking"}, USE]},
        user(result([text("rain")])),
    )  # fmt: skip
    calls = [{"id": "t1", "type": "function", "function": {"name": "forecast", "arguments": '{"place":"Rome"}'}}]
    assert found["messages"][1:] == [
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "name": "forecast", "content": "sun"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "name": "forecast", "content": "rain"},
    ]


def test_texts_before_between_and_after_results_stay_where_they_are() -> None:
    found = as_chat(
        {"role": "assistant", "content": [USE]}, user(text("a"), text("b"), result("sun"), text("c"), result("rain")),
    )["messages"][1:]  # fmt: skip
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "a\nb"), ("tool", "sun"), ("user", "c"), ("tool", "rain"),
    ]  # fmt: skip


def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    found = as_chat(
        {"role": "user", "content": "a"}, user(text("b"), text("c")),
        {"role": "assistant", "content": [thinking, text("Let me look.")]}, {"role": "assistant", "content": [USE]},
        user(result("sun")), {"role": "user", "content": "d"}, {"role": "user", "content": "e"},
    )["messages"]  # fmt: skip
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "a\nb\nc"), ("assistant", "Let me look."), ("tool", "sun"), ("user", "d\ne"),
    ]  # fmt: skip
    assert found[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in found[1]["tool_calls"]] == ["t1"]


def test_system_messages_stay_where_they_are_but_the_first_are_one() -> None:
    first = {"role": "system", "content": "s"}
    later = {"role": "system", "content": [text("t"), text("u")]}
    hello = {"role": "user", "content": "a"}
    assert as_chat(first, later, hello, later, hello, system=[text("r")])["messages"] == [
        {"role": "system", "content": "r\n\ns\nt\nu"}, {"role": "user", "content": "a"},
        {"role": "system", "content": "t\nu"}, {"role": "user", "content": "a"},
    ]  # fmt: skip


@pytest.mark.parametrize("content", [None, "", []])
def test_a_result_may_be_empty(content: Any) -> None:
    assert as_chat({"role": "assistant", "content": [USE]}, user(result(content)))["messages"][1]["content"] == ""


def test_the_system_prompt_may_be_one_text() -> None:
    assert as_chat(system="Be terse.")["messages"][0] == {"role": "system", "content": "Be terse."}


def test_thoughts_of_one_message_are_put_together() -> None:
    thoughts = [{"type": "thinking", "thinking": each} for each in ("hm, ", "well")]
    found = as_chat({"role": "assistant", "content": [*thoughts, text("a")]}, user(text("b")))
    assert found["messages"][0] == {"role": "assistant", "content": "a", "reasoning_content": "hm, well"}


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    found = as_chat({"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"})
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in as_chat()


@pytest.mark.parametrize(
    ("messages", "fields", "param", "reason"),
    [
        ([user({"type": "image", "source": {}})], {}, "messages[0].content[0]",
         "blocks of type 'image' are not supported: the model reads text only"),
        ([user(text("a"), USE)], {}, "messages[0].content[1]",
         "a block of type 'tool_use' is not allowed in a message of role 'user'"),
        ([user(result("x", "n" * 101))], {}, "messages[0].content[0].tool_use_id",
         f"no preceding 'tool_use' has the id '{'n' * 100}'"),
        ([user()], {}, "messages[0].content", "is empty"),
        ([{"role": "user", "content": "a"}, user()], {}, "messages[1].content", "is empty"),
        ([user(text("a")), user(text("b"), USE)], {}, "messages[1].content[1]", "a block of type 'tool_use' is not"),
        ([{"role": "system", "content": [USE]}], {}, "messages[0].content[0]",
         "a block of type 'tool_use' is not allowed in a message of role 'system'"),
        ([{"role": "system", "content": ""}], {}, "messages", "contains no message of the user or the assistant"),
        ([{"role": "assistant", "content": [result("x")]}], {}, "messages[0].content[0]",
         "a block of type 'tool_result' is not allowed in a message of role 'assistant'"),
        ([{"role": "assistant", "content": [USE]}], {}, "messages",
         "ends with a tool call; its 'tool_result' must follow"),
        ([{"role": "assistant", "content": [USE]}, user(result([{"type": "document"}]))], {},
         "messages[1].content[0].content[0]", "blocks of type 'document' are not supported"),
        ([], {"system": [text("a"), {"type": "image"}]}, "system[1]", "blocks of type 'image' are not supported"),
        ([], {"tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing: type 'tool' requires the name"),
        ([], {"mcp_servers": [{}]}, "mcp_servers", "not supported: this server runs no tools"),
        ([], {"container": "c"}, "container", "not supported: this server runs no tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_served_is_refused_by_its_place(
    messages: list[dict[str, Any]], fields: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(ApiError) as refused:
        as_chat(*messages, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: {reason}")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 4},
         {"stop": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 4}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}},
         {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
          "reasoning_effort": "low"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "between_tools"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}},
         {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}},
         {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"x": 1}},
         {"chat_template_kwargs": {"enable_thinking": False, "x": 1}}),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "d"}]},
         {"tools": [{"type": "function",
                     "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}}]}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tool_choice": "any", "parallel_tool_calls": False}),
        ({"tool_choice": {"type": "tool", "name": "f"}},
         {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)  # fmt: skip
def test_fields_take_the_names_of_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = as_chat(**fields)
    assert found.pop("max_completion_tokens") == 5
    assert {name: value for name, value in found.items() if name not in ("messages", "model")} == expected


def stream(events: Iterable[ChatEvent]) -> tuple[list[Event], Message]:
    """The events sent, and the whole message. Checks that a client that adds up the events gets the same message."""
    builder = MessageBuilder("msg_1", "m")
    sent = [event for chat_event in events for event in builder.feed(chat_event)]
    sent += builder.finish()
    assert sent[0]["message"].content == []
    texts = dict.fromkeys((event["index"] for event in sent if event["type"] == "content_block_start"), "")
    for event in sent:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta[{"input_json_delta": "partial_json"}.get(delta["type"], delta["type"][:-6])]
    assert [text_of(block) for block in builder.message.content] == [text or None for text in texts.values()]
    end = sent[-2]
    assert end["delta"] == {
        "stop_reason": builder.message.stop_reason, "stop_sequence": builder.message.stop_sequence,
    }  # fmt: skip
    assert end["usage"] == builder.message.usage
    return sent, builder.message


def text_of(block: Any) -> str | None:
    """The text of a block as its deltas give it; None where there are no deltas."""
    if isinstance(block, ToolUseBlock):
        invalid = block.input.get("invalid_json")
        return invalid or (msgspec.json.encode(block.input).decode() if block.input else None)
    return getattr(block, "text", None) or getattr(block, "thinking", None)


def kinds(events: Iterable[Event]) -> list[str]:
    return [event["type"] for event in events]


def whole(*events: ChatEvent, reason: Any = "stop", stop: str | int | None = None) -> Message:
    return stream([*events, ChoiceFinished(0, reason, stop), used(10, 5, 4)])[1]


def test_the_events_of_an_answer_come_in_order() -> None:
    events, message = stream([
        used(10, 1, 4), ReasoningDelta(0, "hm"), ContentDelta(0, "He"), ContentDelta(0, "llo"),
        ToolCallDelta(0, 0, "t1", "f", ""), ToolCallDelta(0, 0, None, None, '{"a":1}'),
        ToolCallDelta(0, 1, "t2", "g", '{"b":[]}'), ChoiceFinished(0, "tool_calls", None), used(10, 5, 4),
    ])  # fmt: skip
    assert kinds(events) == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    usage = events[0]["message"].usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 1)
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert [msgspec.to_builtins(block) for block in message.content] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "t2", "name": "g", "input": {"b": []}},
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == 5


def test_why_it_ended() -> None:
    call = ToolCallDelta(0, 0, "t1", "f", '{"a":1}')
    assert whole().stop_reason == "end_turn"
    assert whole(reason="length").stop_reason == "max_tokens"
    assert whole(stop=7).stop_reason == "end_turn"
    stopped = whole(stop="END")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert whole(call, reason="tool_calls").stop_reason == "tool_use"
    assert whole(call).stop_reason == "tool_use"


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "nonsense"])
def test_arguments_that_are_no_object_are_not_taken_for_none(arguments: str) -> None:
    message = whole(ToolCallDelta(0, 0, "t1", "f", arguments), reason="length")
    assert message.content[0].input == {"invalid_json": arguments}  # type: ignore[union-attr]


@given(
    st.lists(
        st.one_of(
            st.builds(ContentDelta, st.just(0), st.text(max_size=3)),
            st.builds(ReasoningDelta, st.just(0), st.text(max_size=3)),
            st.builds(ToolCallDelta, st.just(0), st.integers(0, 2), st.just("t"), st.just("f"), st.just("")),
            st.just(used(3, 1, 0)),
        ),
        max_size=12,
    )
)
def test_every_block_begins_ends_and_is_apart(chat: list[ChatEvent]) -> None:
    events, message = stream([*chat, ChoiceFinished(0, "stop", None), used(3, 2, 1)])
    opened: int | None = None
    num_blocks = 0
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                assert event["index"] == num_blocks
                opened, num_blocks = num_blocks, num_blocks + 1
            case "content_block_delta":
                assert event["index"] == opened
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
    assert opened is None
    assert (kinds(events)[0], *kinds(events)[-2:]) == ("message_start", "message_delta", "message_stop")
    said = "".join(each.text for each in chat if isinstance(each, ContentDelta))
    assert "".join(block.text for block in message.content if hasattr(block, "text")) == said


def test_the_effort_is_a_part_of_the_prompt() -> None:
    hello = {"role": "user", "content": "Hi"}
    body = {"messages": [hello], "output_config": {"effort": "low", "format": None}}
    assert prompt_request(msgspec.convert(body, CountTokensRequest)) == {
        "messages": [hello], "model": None, "reasoning_effort": "low",
    }  # fmt: skip
