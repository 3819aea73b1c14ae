"""/v1/responses and /v1/messages with the SDKs that people use, and against the types they are made of."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

import pytest
from pydantic import BaseModel

from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.server.in_process import Server, saying

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

CALL = '<tool_call>\n{"name": "forecast", "arguments": {"place": "Rome"}}\n</tool_call>'
THOUGHTFUL = "<think>\nhm\n</think>\nWell. " + CALL
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FORECAST: Any = {"type": "function", "name": "forecast", "parameters": SCHEMA, "strict": False}
ANTHROPIC_FORECAST: Any = {"name": "forecast", "input_schema": SCHEMA}


@pytest.fixture
def thoughtful() -> Iterator[Server]:
    """A model that thinks, says something and calls a tool."""
    server = saying(THOUGHTFUL, tool_format=TOOL_FORMATS["hermes"], reasoning_format=REASONING_FORMATS["think"])
    yield server
    if server.state.responses is not None:
        server.state.responses.store.close()


@pytest.fixture
def polite() -> Iterator[Server]:
    server = saying("Hello!")
    yield server
    if server.state.responses is not None:
        server.state.responses.store.close()


@asynccontextmanager
async def http_client(default: Any, server: Server) -> AsyncIterator[Any]:
    """A client of the SDK's own HTTP library that calls the application without a socket."""
    library = sys.modules[default.__mro__[1].__module__.partition(".")[0]]
    async with default(transport=library.ASGITransport(server.app)) as client:
        yield client


def with_openai(server: Server, play: Any) -> Any:
    async def run() -> Any:
        async with http_client(openai.DefaultAsyncHttpxClient, server) as client:
            return await play(openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=client))

    return asyncio.run(run())


def with_anthropic(server: Server, play: Any) -> Any:
    async def run() -> Any:
        async with http_client(anthropic.DefaultAsyncHttpxClient, server) as client:
            return await play(anthropic.AsyncAnthropic(base_url="http://x", api_key="none", http_client=client))

    return asyncio.run(run())


def test_openai_responses(polite: Server) -> None:
    async def play(client: Any) -> None:
        first = await client.responses.create(model="quire-tiny", input="Hi")
        assert (first.output_text, first.status) == ("Hello!", "completed")
        second = await client.responses.create(
            model="quire-tiny", input="And?", previous_response_id=first.id, instructions="Be terse.",
            include=["message.output_text.logprobs"], top_logprobs=1,
        )  # fmt: skip
        assert second.output[0].content[0].logprobs[0].top_logprobs[0].token
        assert await client.responses.retrieve(first.id) == first
        assert [item.type async for item in client.responses.input_items.list(second.id)] == ["message"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="quire-tiny", input="Hi", tools=[{"type": "web_search"}])
        assert refused.value.param == "tools[0].type"

    with_openai(polite, play)


def test_openai_responses_in_the_background(polite: Server) -> None:
    async def play(client: Any) -> None:
        response = await client.responses.create(model="quire-tiny", input="Hi", background=True)
        while response.status == "in_progress":
            response = await client.responses.retrieve(response.id)
        assert response.output_text == "Hello!"
        assert (await client.responses.cancel(response.id)).status == "completed"

    with_openai(polite, play)


def test_openai_streams(thoughtful: Server) -> None:
    async def play(client: Any) -> None:
        async with client.responses.stream(model="quire-tiny", input="Hi", tools=[FORECAST]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert json.loads(final.output[2].arguments) == {"place": "Rome"}
        assert kinds[-1] == "response.completed"
        result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "sun"}
        items = [*(item.model_dump() for item in final.output), result]  # what came out goes in again
        again = await client.responses.create(model="quire-tiny", input=items, tools=[FORECAST])
        assert again.output[2].name == "forecast"

    with_openai(thoughtful, play)


class Greeting(BaseModel):
    word: Literal["hello", "bye"]


def test_openai_parses_what_has_a_form(tiny: Server) -> None:
    async def play(client: Any) -> None:
        parsed = await client.responses.parse(
            model="quire-tiny", input="Greet me.", text_format=Greeting, temperature=0, max_output_tokens=64
        )
        assert isinstance(parsed.output_parsed, Greeting)

    with_openai(tiny, play)
    tiny.state.responses.store.close()


def by_name(union: Any) -> dict[str, type[BaseModel]]:
    """The SDK's types of events by their names. It does not hold servers to them; tests can."""
    kinds = get_args(get_args(union)[0])
    return {name: kind for kind in kinds for name in get_args(kind.model_fields["type"].annotation)}


def test_what_openai_streams_is_made_of(thoughtful: Server) -> None:
    kinds = by_name(openai.types.responses.ResponseStreamEvent)
    body = {"input": "Hi", "tools": [FORECAST], "stream": True}
    for fields in ({}, {"max_output_tokens": 3}):
        frames = thoughtful.post("/v1/responses", body | fields).frames
        assert len(frames) > 5
        for frame in frames:
            name, _, data = frame.removeprefix("event: ").partition("\ndata: ")
            kinds[name].model_validate_json(data)
    whole = thoughtful.post("/v1/responses", {"input": "Hi"}).body
    openai.types.responses.Response.model_validate_json(whole)


def test_anthropic_messages(polite: Server) -> None:
    async def play(client: Any) -> None:
        asked: Any = {"model": "quire-tiny", "messages": [{"role": "user", "content": "Hi"}], "system": "Be terse."}
        message = await client.messages.create(max_tokens=64, **asked)
        assert (message.content[0].text, message.stop_reason) == ("Hello!", "end_turn")
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(max_tokens=64, **{**asked, "model": "x"})
        image = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
        with pytest.raises(anthropic.BadRequestError, match="text only"):
            await client.messages.create(
                model="quire-tiny", max_tokens=1, messages=[{"role": "user", "content": image}]
            )

    with_anthropic(polite, play)


def test_anthropic_streams(thoughtful: Server) -> None:
    async def play(client: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        asked: Any = {"model": "quire-tiny", "max_tokens": 200, "tools": [ANTHROPIC_FORECAST]}
        async with client.messages.stream(messages=messages, **asked) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text.strip() == "Well."
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert (final.stop_reason, final.content[2].input) == ("tool_use", {"place": "Rome"})
        assert final.usage.input_tokens + final.usage.cache_read_input_tokens > 0
        result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "sun"}
        messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        again = await client.messages.create(messages=messages, **asked)  # what came out goes in again
        assert again.stop_reason == "tool_use"

    with_anthropic(thoughtful, play)


def test_anthropic_parses_what_has_a_form(tiny: Server) -> None:
    async def play(client: Any) -> None:
        messages = [{"role": "user", "content": "Greet me."}]
        parsed = await client.messages.parse(
            model="quire-tiny", max_tokens=64, messages=messages, output_format=Greeting, extra_body={"temperature": 0}
        )
        assert isinstance(parsed.parsed_output, Greeting)

    with_anthropic(tiny, play)


def test_what_anthropic_streams_is_made_of(thoughtful: Server) -> None:
    kinds = by_name(anthropic.types.RawMessageStreamEvent)
    body = {"max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}], "tools": [ANTHROPIC_FORECAST]}
    for fields in ({}, {"max_tokens": 3}):
        frames = thoughtful.post("/v1/messages", {**body, **fields, "stream": True}).frames
        assert len(frames) > 5
        for frame in frames:
            name, _, data = frame.removeprefix("event: ").partition("\ndata: ")
            kinds[name].model_validate_json(data)
    anthropic.types.Message.model_validate_json(thoughtful.post("/v1/messages", body).body)
