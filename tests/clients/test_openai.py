"""OpenAI's Python SDK against a real server: chats, completions, models and errors."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from functools import partial

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.served import MAX_NUM_SEQS, MAX_WAITING, MODEL, Served, saying_server

QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
ANSWER = "Serialize"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"celsius": {"type": "boolean"}, "place": {"enum": ["Oslo", "Kyoto"]}},
            "required": ["celsius", "place"],
            "additionalProperties": False,
        },
    },
}


class Weather(pydantic.BaseModel):
    """The tool's arguments, and the answer of a parse."""

    model_config = pydantic.ConfigDict(extra="forbid")
    celsius: bool
    place: str = pydantic.Field(max_length=12)


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(**served.openai, max_retries=0) as client:
        yield client


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 2048


def test_a_chat_is_answered(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert ANSWER in choice.message.content
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_predicted_output_is_the_same_and_counted() -> None:
    text = "The cat sat on the mat, and the dog lay beside it."
    config = {"method": "prediction", "num_speculative_tokens": 4, "adaptive": False}
    with saying_server(text, speculation=config) as server, OpenAI(**server.openai, max_retries=0) as client:
        create = partial(client.chat.completions.create, model=MODEL, messages=QUESTION)
        plain = create()
        content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        answer = create(prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == plain.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        assert answer.usage.completion_tokens > details.accepted_prediction_tokens > 6
        assert details.rejected_prediction_tokens == 0
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
        wrong = {"type": "content", "content": text[:20] + " ran away."}
        with create(prediction=wrong, stream=True, stream_options={"include_usage": True}) as stream:
            *_, last = stream
        assert last.usage.completion_tokens_details.accepted_prediction_tokens > 2
        assert last.usage.completion_tokens_details.rejected_prediction_tokens > 0
        with pytest.raises(openai.BadRequestError, match="prediction") as refused:
            create(prediction={"type": "content", "content": 5})
        assert refused.value.param.startswith("prediction")


def test_the_stream_helper_builds_the_whole_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_async_chats_share_the_engine(served: Served) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(**served.openai) as client:
            asked = [
                client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=12)
                for _ in range(8)
            ]
            stream = await client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, stream=True
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return [streamed, *(answer.choices[0].message.content for answer in await asyncio.gather(*asked))]

    answers = asyncio.run(ask())
    assert len(answers) == 9
    assert len(set(answers)) == 1


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    def say(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, seed=seed, n=3, temperature=1.5, max_tokens=16
        )
        return [choice.message.content for choice in answer.choices]

    assert say(7) == say(7)
    assert len(set(say(7) + say(8))) > 3


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    told = answer.choices[0].logprobs.content
    assert "".join(token.token for token in told) == answer.choices[0].message.content
    for token in told:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED])
def test_a_tool_that_must_be_called(client: OpenAI, choice) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    asked["parallel_tool_calls"] = False
    if choice == ALLOWED:
        asked["tools"] = [WEATHER, {"type": "function", "function": {"name": "other"}}]
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    assert Weather.model_validate_json(call.function.arguments).place in ("Oslo", "Kyoto")
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert "".join(pieces) == call.function.arguments
    assert pieces
    (same,) = streamed.message.tool_calls
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    assert streamed.finish_reason == whole.finish_reason == ("stop" if choice == NAMED else "tool_calls")


def test_tools_that_the_model_calls_by_itself() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"celsius": true, "place": "%s"}}\n</tool_call>'
    with (
        saying_server("Let me see. " + call % "Oslo" + "\n" + call % "Kyoto") as served,
        OpenAI(**served.openai) as client,
        client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[WEATHER]) as stream,
    ):
        contents = [event.delta for event in stream if event.type == "content.delta"]
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert "".join(contents).strip() == "Let me see."
    arguments = [json.loads(each.function.arguments) for each in choice.message.tool_calls]
    assert arguments == [{"celsius": True, "place": place} for place in ("Oslo", "Kyoto")]
    assert len({each.id for each in choice.message.tool_calls}) == 2


def test_a_parse_gives_the_model_of_the_answer(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_completions_with_the_prompt_echoed_and_scored(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["import os\n", "def f("], max_tokens=3, echo=True, logprobs=2, n=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text.startswith("import os\n" if choice.index < 2 else "def f(")
        told = choice.logprobs
        assert "".join(told.tokens) == choice.text
        assert told.token_logprobs[0] is None
        assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(len(told.tokens))]
        assert all(2 <= len(top) <= 3 for top in told.top_logprobs[1:])


def test_completions_keep_the_best_samples(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="import", best_of=4, n=2, max_tokens=4, seed=3, logprobs=0)
    means = [sum(choice.logprobs.token_logprobs) / 4 for choice in answer.choices]
    assert len(means) == 2
    assert means[0] >= means[1]


def test_completions_stream(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "import", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole


def test_raw_headers(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-1"}, extra_body={"mood": "good"}
    )
    assert raw.headers["x-request-id"] == raw.parse()._request_id == "mine-1"
    assert raw.parse().id == "cmpl-mine-1"
    assert "mood" in raw.headers["x-quire-warning"]


def test_errors_are_the_sdks_own(client: OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 4000)
    assert long.value.code == "context_length_exceeded"
    assert "2048" in long.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    with (
        OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_requests_beyond_the_waiting_limit_get_a_retry_time(served: Served) -> None:
    async def flood() -> list[object]:
        async with AsyncOpenAI(**served.openai, max_retries=0) as client:
            asked = [
                asyncio.ensure_future(
                    client.completions.create(model=MODEL, prompt="x", max_tokens=100, extra_body={"ignore_eos": True})
                )
                for _ in range(MAX_NUM_SEQS + MAX_WAITING + 40)
            ]
            os.kill(served.pids[1], signal.SIGSTOP)  # the engine: no request ends before the queue is full
            try:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            finally:
                os.kill(served.pids[1], signal.SIGCONT)
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refused
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert {answer.usage.completion_tokens for answer in answers if answer not in refused} == {100}
    served.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: Served, stream: bool) -> None:
    endless = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "extra_body": {"ignore_eos": True, "n": 4}}

    async def leave() -> None:
        async with AsyncOpenAI(**served.openai, max_retries=0) as client:
            if stream:
                chunks = await client.completions.create(**endless, stream=True)
                await anext(aiter(chunks))
                await chunks.close()
            else:
                with pytest.raises(openai.APITimeoutError):
                    await client.completions.create(**endless, timeout=0.3)

    served.wait_until_idle()
    before = served.metric("vllm:generation_tokens_total")
    asyncio.run(leave())
    served.wait_until_idle()
    assert served.metric("vllm:generation_tokens_total") - before < 4 * 2000
