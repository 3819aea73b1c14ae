"""Requests go on in another engine as if the first had not died: nothing is missing, told twice or different."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, EngineDeadError, QuireError, RequestOutput, SamplingParams
from quire.engine.process.messages import AddAny, AddRequest, Ready
from quire.interfaces.async_llm import request_table
from quire.interfaces.async_llm.output_processor import RequestState
from tests.effort import examples

from .door import Door
from .local_engine import local_llm
from .wanted import offline, requests, told, whole

ARGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 96, "num_threads": 1}
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, output_kind="delta")


class Mortal(Door):
    """Over an engine that dies when it is told; what LLM makes of the same requests is the oracle."""

    def __init__(self) -> None:
        self.deaths: list[int] = []
        """frames after which the engines to come die, one after another"""
        self.oracle = LLM(**ARGS)
        super().__init__(make=lambda: local_llm(LLM(**ARGS).engine, self._lives()))

    def _lives(self) -> Iterator[int | None]:
        while True:
            yield self.deaths.pop(0) if self.deaths else None

    def die_after(self, *num_frames: int | None) -> None:
        """The engine that runs dies after the first number of frames, its successors after the others."""
        self.llm.group.engines[0]._client._num_left, *self.deaths = num_frames

    async def until_tokens(self, num_outputs: int) -> None:
        await self.record.until(lambda: len(self.record.of("tokens")) >= num_outputs)


@pytest.fixture(scope="module")
def shared() -> Iterator[Mortal]:
    mortal = Mortal()
    yield mortal
    mortal.close()


@pytest.fixture
def mortal(shared: Mortal) -> Iterator[Mortal]:
    shared.record.events.clear()
    yield shared
    shared.die_after(None)
    (output,) = shared.run(shared.outputs("a", SamplingParams(max_tokens=1)))
    assert output.finished, "an engine serves, whatever a test did"
    shared.oracle.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)  # their seeds go on side by side
    assert len(shared.record.of("start")) == len(shared.record.of("end"))


@settings(max_examples=examples(40), deadline=None)
@given(wanted=requests, deaths=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_what_is_emitted_is_what_it_would_have_been(
    shared: Mortal, wanted: list[tuple[Any, Any]], deaths: list[int]
) -> None:
    expected = offline(shared.oracle, wanted)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_table, "MAX_DEATHS", 100)
        shared.die_after(*deaths)
        got = shared.run(shared.all_outputs(wanted))
    shared.die_after(None)
    for (_, params), output, outputs in zip(wanted, expected, got, strict=True):
        assert told(whole(outputs, getattr(params, "output_kind", "final_only"))) == told(output)


def test_scores_are_made_again(mortal: Mortal) -> None:
    alone = mortal.run(mortal.llm.score_tokens("def f(x):", " return x + 1", request_id="before"))
    mortal.die_after(0)
    again = mortal.run(mortal.llm.score_tokens("def f(x):", " return x + 1", request_id="after"))
    assert again.prompt_logprobs == alone.prompt_logprobs


def test_a_request_is_timed_from_its_first_token_with_any_engine(mortal: Mortal) -> None:
    first: list[float] = []

    async def read() -> RequestOutput:
        async for output in mortal.llm.generate("a", LONG, request_id="timed"):
            assert output.metrics is not None
            first.append(output.metrics.first_token_time or 0.0)
        return output

    before = mortal.llm.num_replayed
    mortal.die_after(3)
    output = mortal.run(read())
    assert mortal.llm.num_replayed == before + 1
    assert len(set(first)) == 1
    assert first[0] > 0
    assert output.metrics.finished_time > first[0]
    assert sum(count for _, count in mortal.record.of("tokens")) == LONG.max_tokens


def test_what_two_engines_have_died_with_is_not_given_to_a_third(mortal: Mortal) -> None:
    before = mortal.llm.num_restarts
    mortal.die_after(2, 2)
    with pytest.raises(EngineDeadError, match="died as it was told"):
        mortal.run(mortal.outputs("a", LONG))
    assert mortal.record.of("end")[0][1] == "error"
    mortal.run(mortal.outputs("b", LONG))
    assert mortal.llm.num_restarts == before + 2


def test_samples_that_would_go_on_differently_fail(mortal: Mortal) -> None:
    async def tamper() -> None:
        reading = asyncio.create_task(mortal.outputs("a", SamplingParams(n=2, seed=1, max_tokens=60, ignore_eos=True)))
        await mortal.until_tokens(3)
        (request,) = mortal.llm._requests.tables[0].requests.values()
        request.samples[1].token_ids[-1] ^= 1
        mortal.die_after(0)
        with pytest.raises(QuireError, match="generated different tokens"):
            await reading

    mortal.run(tamper())


def test_a_request_aborted_while_there_is_no_engine_is_not_replayed(
    mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = mortal.llm._requests.tables[0]
    on_death, on_restart = table.on_death, table.on_restart

    async def leave() -> None:
        reading, restarted = asyncio.create_task(mortal.outputs("a", LONG)), asyncio.Event()

        def leave_too(error: EngineDeadError) -> None:
            on_death(error)
            reading.cancel()

        def restart(ready: Ready) -> None:
            on_restart(ready)
            restarted.set()

        monkeypatch.setattr(table, "on_death", leave_too)
        monkeypatch.setattr(table, "on_restart", restart)
        await mortal.until_tokens(3)
        before = mortal.llm.num_replayed
        mortal.die_after(0)
        with pytest.raises(asyncio.CancelledError):
            await reading
        await restarted.wait()
        assert mortal.llm.num_replayed == before

    mortal.run(leave())


def test_samples_that_start_again_count_their_drafts_anew(mortal: Mortal, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    original = RequestState.replay

    def replay(state: RequestState) -> AddAny:
        state.outputs.metrics.drafts = {"ngram": (7, 3)}
        message = original(state)
        assert isinstance(message, AddRequest)
        assert message.progress is not None
        counted.append(message.progress.metrics.drafts)
        return message

    monkeypatch.setattr(RequestState, "replay", replay)
    for n in (2, 1):
        mortal.die_after(3)
        mortal.run(mortal.outputs("a", SamplingParams(n=n, seed=1, max_tokens=30, ignore_eos=True)))
    assert counted == [{}, {"ngram": (7, 3)}]
