"""The life of a request behind AsyncLLM: what is refused, what can be ended when, and who is told."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire import (
    BeamSearchParams,
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.engine.process.messages import CacheFrame

from .door import Door

LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True, output_kind="delta")
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, output_kind="delta")


@pytest.fixture(scope="module")
def shared() -> Iterator[Door]:
    door = Door(num_gpu_blocks_override=128, max_num_seqs=4, num_threads=1)
    yield door
    door.close()


@pytest.fixture
def door(shared: Door) -> Iterator[Door]:
    """Whatever a test did, nothing is left in the engine."""
    shared.record.events.clear()
    yield shared
    shared.run(shared.drained())
    assert len(shared.record.of("start")) == len(shared.record.of("end"))


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], SHORT, InvalidPromptError, "empty"),
        ([9999], SHORT, InvalidPromptError, "9999"),
        (None, SHORT, InvalidPromptError, "neither text nor token ids"),
        ({"text": "a"}, SHORT, InvalidPromptError, "'prompt'"),
        ("\ud800", SHORT, InvalidPromptError, "Unicode"),
        ([5] * 3000, SHORT, PromptTooLongError, "3000 tokens.*2048"),
        ("a b " * 10_000, SHORT, PromptTooLongError, "tokens.*2048"),
        ("a" * 10_000_000, SHORT, PromptTooLongError, "10,000,000 characters.*2048"),
        ("a", {"n": 1}, InvalidParamsError, "not dict"),
        ("a", SamplingParams(n=5), InvalidParamsError, "max_num_seqs=4"),
        ("a", SamplingParams(logprobs=50), InvalidParamsError, "max_logprobs"),
        ("a", SamplingParams(top_k=2**80), InvalidParamsError, "cannot be sent"),
        ("a", SamplingParams(logits_processors=[lambda ids, logits: logits]), InvalidParamsError, "LLM only"),
        ("a", BeamSearchParams(5, 1), InvalidParamsError, "beam_width=5"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_queued(
    door: Door, prompt: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        door.run(door.outputs(prompt, params))
    assert door.record.events == []


@pytest.mark.parametrize("request_id", [5, None, b"a", ["a"], "\ud800", "x" * 5000])
def test_a_request_id_that_is_no_text_costs_nobody_else_anything(door: Door, request_id: Any) -> None:
    async def both() -> list[int]:
        other = door.llm.generate("a", LONG, request_id="other")
        await anext(other)
        with pytest.raises(InvalidParamsError, match=r"request_id=.* must be a Unicode string"):
            await anext(door.llm.generate("a", SHORT, request_id=request_id))
        return (await anext(other)).outputs[0].token_ids

    assert door.run(both())


def test_numbers_and_lists_of_other_types_are_sent(door: Door) -> None:
    odd = SamplingParams(
        temperature=np.float64(0.5), top_p=np.float64(0.9), seed=5, max_tokens=3, allowed_token_ids=range(300, 400)
    )
    plain = SamplingParams(temperature=0.5, top_p=0.9, seed=5, max_tokens=3, allowed_token_ids=[*range(300, 400)])
    texts = [door.run(door.outputs("a", params))[-1].outputs[0].text for params in (odd, plain)]
    assert texts[0] == texts[1]


def test_a_text_that_is_cut_may_be_longer_than_any_prompt(door: Door) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=5)
    (output,) = door.run(door.outputs("a b " * 20_000, params))
    assert len(output.prompt_token_ids) == 5


def test_a_request_id_is_taken_until_its_request_ends(door: Door) -> None:
    async def twice() -> None:
        first = door.llm.generate("a", LONG, request_id="same")
        await anext(first)
        with pytest.raises(RequestError, match="'same' is in use"):
            await anext(door.llm.generate("b", LONG, request_id="same"))
        await first.aclose()
        again = [output async for output in door.llm.generate("b", SHORT, request_id="same")]
        assert sum(len(output.outputs[0].token_ids) for output in again) == 3, "none is the first request's"

    door.run(twice())


@pytest.mark.parametrize("params", [LONG, SamplingParams(n=3, max_tokens=600, ignore_eos=True)])
def test_closing_the_generator_aborts(door: Door, params: SamplingParams) -> None:
    async def leave() -> None:
        outputs = door.llm.generate("a", params, request_id="left")
        await anext(outputs)
        await outputs.aclose()
        assert door.record.of("end")[0][:2] == ("left", "abort")

    door.run(leave())


def test_cancelling_the_caller_aborts(door: Door) -> None:
    async def cancel() -> None:
        caller = asyncio.create_task(door.outputs("a", LONG))
        await door.record.until(lambda: bool(door.record.of("tokens")))
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert door.record.of("end")[0][1] == "abort"

    door.run(cancel())


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        BeamSearchParams(2, 500, ignore_eos=True),
        SamplingParams(max_tokens=500, structured_outputs=StructuredOutputsParams(regex="[a-z]{400}")),
    ],
    ids=["sampling", "beams", "grammar"],
)
@pytest.mark.parametrize("num_before", [0, 4])
def test_abort_ends_a_request_that_runs_or_waits(door: Door, params: Any, num_before: int) -> None:
    """Behind as many requests as may run, it waits."""

    async def end() -> None:
        others = [asyncio.create_task(door.outputs(f"{i}", LONG)) for i in range(num_before)]
        await door.record.until(lambda: len({event[0] for event in door.record.of("tokens")}) == num_before)
        caller = asyncio.create_task(door.llm.generate("a", params, request_id="ended").__anext__())
        await door.record.until(lambda: "ended" in [event[0] for event in door.record.of("start")])
        await door.llm.abort("nobody's")
        if isinstance(params, SamplingParams) and params.output_kind == "delta" and not num_before:
            await caller
        else:
            await door.llm.abort("ended")
            output = await caller
            assert output.finished
            assert [sample.finish_reason for sample in output.outputs] == ["abort"]
        await door.llm.abort("ended")
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    door.run(end())


def test_a_slow_caller_gets_what_has_come_in_one_output(door: Door) -> None:
    async def dawdle() -> None:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, output_kind="delta", logprobs=0)
        outputs = door.llm.generate("Once", params, request_id="slow")
        first = await anext(outputs)
        await door.record.until(lambda: bool(door.record.of("end")))
        rest = [output async for output in outputs]
        assert len(rest) == 1
        assert rest[0].finished
        assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 50
        assert len(rest[0].outputs[0].logprobs or ()) == len(rest[0].outputs[0].token_ids)

    door.run(dawdle())


def test_listeners_are_notified_of_the_start_every_token_and_the_end(door: Door) -> None:
    params = SamplingParams(n=2, seed=0, max_tokens=40, ignore_eos=True, stop=["e"], output_kind="delta")
    outputs = door.run(door.outputs([5, 6, 7], params))
    ((request_id, num_prompt_tokens),) = door.record.of("start")
    ((ended_id, reason, metrics, _),) = door.record.of("end")
    assert request_id == ended_id == outputs[-1].request_id
    assert num_prompt_tokens == 3
    assert reason == "stop"
    num_tokens = sum(event[1] for event in door.record.of("tokens"))
    assert num_tokens == sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_a_listener_that_raises_costs_no_request_a_token(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    class Raising:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    whole = replace(SHORT, output_kind="final_only")  # how many deltas there are depends on how fast they are taken
    (before,) = door.run(door.outputs("a", whole))
    listeners = door.llm._requests.listeners
    listeners.insert(0, Raising())
    try:
        (after,) = door.run(door.outputs("a", whole))
        door.run(door.drained())
    finally:
        del listeners[0]
    assert after.outputs == before.outputs
    assert len(door.record.of("end")) == 2
    assert "on_request_start" in caplog.text


def test_a_grammar_that_is_wrong_comes_back_as_the_outputs_error(door: Door) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(unclosed"))
    (output,) = door.run(door.outputs("a", params))
    assert output.outputs[0].finish_reason == "ignored"
    assert "regex" in (output.error or "")
    assert door.record.of("end")[0][1] == "error"


def test_a_schema_deeper_than_messages_may_be_arrives(door: Door) -> None:
    schema: dict[str, Any] = {"type": "integer", "maximum": 2**70}
    for _ in range(30):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(json=schema))
    (output, *_) = door.run(door.outputs("a", params))
    assert output.outputs[0].finish_reason in (None, "length", "ignored")


def test_watchers_get_every_frame_or_an_end(door: Door) -> None:
    async def watch() -> None:
        quick, slow = door.llm.watch_cache(), door.llm.watch_cache()
        waiting = [asyncio.ensure_future(anext(quick)), asyncio.ensure_future(anext(slow))]
        await asyncio.sleep(0)
        sent = [b"%d" % i for i in range(100)]
        got = []
        for frame in sent:
            door.llm.group.watchers[0].on_message(CacheFrame(frame))
            got.append(await (anext(quick) if got else waiting[0]))
        assert got == sent
        behind = [await waiting[1], *[frame async for frame in slow]]
        assert behind == sent[: len(behind)]
        assert len(behind) < len(sent)
        await quick.aclose()

    door.run(watch())


def test_signals_of_the_terminal_do_not_reach_the_engine(door: Door) -> None:
    pid = door.llm.engine_pid
    assert os.getsid(pid) == pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert door.run(door.outputs("a", SHORT))[-1].finished
