"""LangChain's client for OpenAI's API against a real server."""

import asyncio
import functools
import operator
from typing import Literal

import pydantic
import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.served import MODEL, Served, saying_server

QUESTION = "What does json.dumps do?"


class LookUp(pydantic.BaseModel):
    """Look a function up."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["json.dumps", "json.loads"]


def chat_model(served: Served, **kwargs) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, temperature=0, max_retries=0, **served.openai, **kwargs)


def test_invoke_and_stream_say_the_same(served: Served) -> None:
    model = chat_model(served, stream_usage=True)
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    assert "Serialize" in whole.content
    assert "".join(chunk.content for chunk in chunks) == whole.content
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert whole.response_metadata["finish_reason"] == "stop"


def test_the_responses_api_says_the_same(served: Served) -> None:
    model = chat_model(served)
    answer = chat_model(served, use_responses_api=True).invoke(QUESTION)
    assert answer.text == model.invoke(QUESTION).content


def test_batches_and_async_calls(served: Served) -> None:
    model = chat_model(served, max_tokens=8)
    batch = model.batch([QUESTION] * 3)
    answer = asyncio.run(model.ainvoke([SystemMessage("Be brief."), HumanMessage(QUESTION)]))
    assert len({message.content for message in batch}) == 1
    assert answer.response_metadata["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("choice", ["LookUp", "any"])
def test_bound_tools(served: Served, choice: str) -> None:
    model = chat_model(served).bind_tools([LookUp], tool_choice=choice, parallel_tool_calls=False)
    (call,) = model.invoke(QUESTION).tool_calls
    assert call["name"] == "LookUp"
    assert LookUp.model_validate(call["args"])


def test_a_tool_that_the_model_calls_by_itself_and_its_result() -> None:
    said = '<tool_call>\n{"name": "LookUp", "arguments": {"name": "json.loads"}}\n</tool_call>'
    with saying_server(said) as served:
        model = chat_model(served).bind_tools([LookUp])
        message = functools.reduce(operator.add, model.stream(QUESTION))
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("LookUp", {"name": "json.loads"})
        conversation = [HumanMessage(QUESTION), message, ToolMessage("Deserialize.", tool_call_id=call["id"])]
        assert model.invoke(conversation).tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(served: Served, method: Literal["json_schema", "function_calling"]) -> None:
    made = chat_model(served).with_structured_output(LookUp, method=method).invoke(QUESTION)
    assert isinstance(made, LookUp)
