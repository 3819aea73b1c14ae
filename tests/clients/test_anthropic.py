"""Anthropic's Python SDK against a real server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import anthropic
import pydantic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.clients.served import KEY, MODEL, Served, saying_server

QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
GREEDY = {"temperature": 0}
"""a field of the API that the SDK has no argument for"""
LOOK_UP = {
    "name": "look_up",
    "description": "Look a function up",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"enum": ["json.dumps", "json.loads"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
}


class Entry(pydantic.BaseModel):
    """The form of a parsed answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["function", "class"]
    is_public: bool


@pytest.fixture
def client(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message_is_answered(client: Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=60, messages=QUESTION, extra_body=GREEDY, system="Be brief."
    )
    assert (answer.role, answer.type, answer.stop_reason) == ("assistant", "message", "end_turn")
    assert answer.content[0].text
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0
    assert answer.usage.output_tokens > 0


def test_models_are_listed_and_described(client: Anthropic) -> None:
    (listed,) = client.models.list()
    assert (listed.type, listed.id, listed.display_name) == ("model", MODEL, MODEL)
    assert listed == client.models.retrieve(MODEL)
    assert listed.created_at.tzinfo is not None


def test_a_stream_says_the_same(client: Anthropic) -> None:
    asked = {"model": MODEL, "max_tokens": 60, "messages": QUESTION, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "Serialize" in whole.content[0].text
    assert texts  # how many pieces there are depends on how fast they are read
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_async_messages(served: Served) -> None:
    async def ask() -> list[str]:
        async with AsyncAnthropic(base_url=served.url, api_key=KEY) as client:
            create = client.messages.create
            answers = await asyncio.gather(
                *(create(model=MODEL, max_tokens=9, messages=QUESTION, extra_body=GREEDY) for _ in range(4))
            )
            return [answer.content[0].text for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1


def test_a_stop_sequence_is_reported(client: Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=60, messages=QUESTION, extra_body=GREEDY, stop_sequences=["JSON"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "JSON")
    assert "JSON" not in answer.content[0].text


@pytest.mark.parametrize("thinking", [{"type": "between_tools"}, {"type": "adaptive", "display": "omitted"}])
def test_every_kind_of_thinking_is_accepted(client: Anthropic, thinking) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=4, messages=QUESTION, thinking=thinking)
    assert [block.type for block in answer.content] == ["text"]


def test_a_tool_that_must_be_called_and_its_result(client: Anthropic) -> None:
    asked = {"model": MODEL, "max_tokens": 60, "extra_body": GREEDY, "tools": [LOOK_UP]}
    choice = {"type": "tool", "name": "look_up"}
    call = client.messages.create(**asked, messages=QUESTION, tool_choice=choice).content[0]
    assert (call.type, call.name, set(call.input)) == ("tool_use", "look_up", {"name"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Serialize an object."}
    conversation = [
        *QUESTION,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked, messages=conversation, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]


def test_a_tool_that_the_model_calls_by_itself_is_streamed() -> None:
    said = 'Let me see. <tool_call>\n{"name": "look_up", "arguments": {"name": "json.loads"}}\n</tool_call>'
    with (
        saying_server(said) as served,
        Anthropic(base_url=served.url, api_key=KEY) as client,
        client.messages.stream(model=MODEL, max_tokens=200, messages=QUESTION, tools=[LOOK_UP]) as stream,
    ):
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    text, call = final.content
    assert text.text.strip() == "Let me see."
    assert (call.name, call.input, final.stop_reason) == ("look_up", {"name": "json.loads"}, "tool_use")
    assert json.loads("".join(pieces)) == call.input


def test_a_parse_gives_the_model_of_the_answer(client: Anthropic) -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=60, messages=QUESTION, output_format=Entry)
    assert isinstance(answer.parsed_output, Entry)


def test_counted_tokens_are_those_of_the_message(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
    usage = client.messages.create(model=MODEL, messages=QUESTION, system="Be brief.", max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_sdks_own(client: Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=MODEL, max_tokens=4, messages=QUESTION, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError, match="quire-tiny"):
        client.messages.create(model="claude-x", max_tokens=4, messages=QUESTION)
    with (
        Anthropic(base_url=served.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model=MODEL, max_tokens=4, messages=QUESTION)
