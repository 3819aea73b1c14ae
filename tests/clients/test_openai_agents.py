"""OpenAI's Agents SDK against a real server: agents that call tools until they have an answer."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import agents
import pydantic
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI

from tests.clients.served import MODEL, Served, saying_server

QUESTION = "Is it warmer in Oslo or in Kyoto?"
MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


class Entry(pydantic.BaseModel):
    """The form of a final answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["function", "class"]


@pytest.fixture(autouse=True)
def _no_traces() -> Iterator[None]:
    """The SDK would send its traces to OpenAI."""
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


def agent(model: type, client: AsyncOpenAI, **kwargs: Any) -> Agent[Any]:
    settings = kwargs.pop("model_settings", ModelSettings(temperature=0))
    return Agent("weather", model=model(model=MODEL, openai_client=client), model_settings=settings, **kwargs)


def calling(place: str) -> str:
    call = {"name": "temperature", "arguments": {"place": place}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_tools_until_it_answers(model: type, stream: bool) -> None:
    asked = []

    @agents.function_tool
    def temperature(place: str) -> str:
        """The temperature of a place."""
        asked.append(place)
        return {"Oslo": "4 °C", "Kyoto": "19 °C"}[place]

    async def run(served: Served) -> list[Any]:
        async with AsyncOpenAI(**served.openai, max_retries=0) as client:
            weather = agent(model, client, tools=[temperature])
            if not stream:
                result = await Runner.run(weather, QUESTION, max_turns=4)
            else:
                result = Runner.run_streamed(weather, QUESTION, max_turns=4)
                kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
                assert kinds == ["tool_called", "tool_output", "tool_called", "tool_output", "message_output_created"]
            return [result.final_output, len(result.raw_responses), result.to_input_list()]

    with saying_server("In Kyoto.", first_replies=(calling("Oslo"), calling("Kyoto"))) as served:
        answer, num_turns, items = asyncio.run(run(served))
    assert (answer, num_turns, asked) == ("In Kyoto.", 3, ["Oslo", "Kyoto"])
    assert [item["output"] for item in items if item.get("type") == "function_call_output"] == ["4 °C", "19 °C"]


@pytest.mark.parametrize("model", MODELS)
def test_an_agents_last_answer_is_a_pydantic_model(model: type, served: Served) -> None:
    async def run() -> object:
        async with AsyncOpenAI(**served.openai, max_retries=0) as client:
            return (await Runner.run(agent(model, client, output_type=Entry), "What is json.dumps?")).final_output

    assert isinstance(asyncio.run(run()), Entry)


@pytest.mark.parametrize("model", MODELS)
def test_the_embedded_model_calls_a_tool_that_it_must_call(model: type, served: Served) -> None:
    asked = []

    @agents.function_tool
    def look_up(name: Literal["json.dumps", "json.loads"]) -> str:
        """Look a function up."""
        asked.append(name)
        return "Serialize an object."

    async def run() -> agents.RunResult:
        async with AsyncOpenAI(**served.openai, max_retries=0) as client:
            settings = ModelSettings(temperature=0, tool_choice="look_up", max_tokens=64)
            return await Runner.run(agent(model, client, tools=[look_up], model_settings=settings), QUESTION)

    result = asyncio.run(run())
    assert asked
    assert set(asked) <= {"json.dumps", "json.loads"}
    assert isinstance(result.final_output, str)  # the SDK forces only the first call
