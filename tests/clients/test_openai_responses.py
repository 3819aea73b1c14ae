"""OpenAI's Python SDK against /v1/responses of a real server."""

import json
import time
from collections.abc import Iterator

import openai
import pydantic
import pytest
from openai import OpenAI

from tests.clients.served import MODEL, Served, saying_server

QUESTION = "What does json.dumps do?"
WAIT_S = 60
LOOK_UP = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"name": {"enum": ["json.dumps", "json.loads"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Entry(pydantic.BaseModel):
    """The form of a parsed answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    is_function: bool


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(**served.openai, max_retries=0) as client:
        yield client


def test_a_response_is_kept_and_forgotten(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert made.status == "completed"
    assert "Serialize" in made.output_text
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert client.responses.retrieve(made.id).output == made.output
    (asked,) = client.responses.input_items.list(made.id).data
    assert asked.content[0].text == QUESTION
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas  # how many depends on how fast they are read
    assert "".join(deltas) == final.output_text == whole.output_text


def test_a_response_goes_on_with_an_earlier_one(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    second = client.responses.create(
        model=MODEL, input="What does os.rename do?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_" + "0" * 32)
    assert unknown.value.param == "previous_response_id"


def test_a_response_that_is_not_stored(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, store=False, max_output_tokens=2)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_background_response_is_waited_for(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, temperature=0, background=True)
    assert made.status in ("queued", "in_progress")
    deadline = time.monotonic() + WAIT_S
    while made.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        made = client.responses.retrieve(made.id)
    assert (made.status, made.background) == ("completed", True)
    assert "Serialize" in made.output_text


def test_a_background_response_is_cancelled(client: OpenAI, served: Served) -> None:
    made = client.responses.create(
        model=MODEL, input=QUESTION, background=True, extra_body={"ignore_eos": True}, max_output_tokens=1900
    )
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    served.wait_until_idle()


def test_a_parse_gives_the_model_of_the_answer(client: OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Entry, temperature=0)
    assert isinstance(answer.output_parsed, Entry)


def test_a_call_and_its_result(client: OpenAI) -> None:
    asked = client.responses.create(model=MODEL, input=QUESTION, tools=[LOOK_UP], tool_choice="required", temperature=0)
    call = asked.output[0]
    assert (call.type, call.name) == ("function_call", "look_up")
    assert set(json.loads(call.arguments)) == {"name"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Serialize an object."}
    answer = client.responses.create(
        model=MODEL, previous_response_id=asked.id, input=[result], tools=[LOOK_UP], max_output_tokens=8
    )
    assert answer.output[0].type == "message"


def test_only_an_allowed_tool_is_called(client: OpenAI) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]}
    tools = [{"type": "function", "name": "other", "parameters": None, "strict": None}, LOOK_UP]
    asked = {"model": MODEL, "input": QUESTION, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    made = client.responses.create(**asked, temperature=0)
    assert [(item.type, item.name) for item in made.output] == [("function_call", "look_up")]
    assert made.tool_choice.model_dump() == choice
    assert client.responses.retrieve(made.id).tool_choice == made.tool_choice


def test_a_call_the_model_makes_by_itself_is_streamed() -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "json.loads"}}\n</tool_call>'
    with (
        saying_server(call) as served,
        OpenAI(**served.openai) as client,
        client.responses.stream(model=MODEL, input=QUESTION, tools=[LOOK_UP]) as stream,
    ):
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (made,) = stream.get_final_response().output
    assert (made.type, made.name) == ("function_call", "look_up")
    assert json.loads("".join(deltas)) == json.loads(made.arguments) == {"name": "json.loads"}


def test_a_wrong_field_is_named(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model=MODEL, input=QUESTION, top_p=7)
    assert wrong.value.param == "top_p"
