"""Ranks that fail, die, hang or answer nonsense: steps are tried again, engines end and are replaced, nothing stays."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.common.batch import Batch, decode, encode
from quire.common.errors import EngineBrokenError, OutOfMemoryError
from quire.common.faults import Fault, environment, inject
from quire.runner import executor as executors
from quire.runner.parallel import executor as ranks_executor
from quire.runner.parallel import links, rank_process
from quire.runner.parallel.executor import RanksExecutor
from quire.runner.parallel.messages import Failed, Step
from tests import forks
from tests.async_llm import door as door_module
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.parallel.ranks import answers, in_threads

pytestmark = needs_native
PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 200, 300] * 9, [7] * 3]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True, logprobs=1) for i in range(3)]
TINY: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 40}
RANKS: dict[str, Any] = {**TINY, "tensor_parallel_size": 2, "num_threads": 1}


@pytest.fixture(scope="module")
def expected() -> Any:
    return answers(LLM(**TINY), PROMPTS, PARAMS)


@pytest.fixture
def llm() -> Iterator[LLM]:
    """Its second rank is a thread, so that faults of this process are its too."""
    with in_threads():
        made = LLM(**RANKS)
        yield made
        made.engine.executor.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("rank.step", after=3),
        Fault("rank.step", error="MemoryError", times=2),
        Fault("memory.workspace", error="MemoryError", after=40),
        Fault("memory.workspace", error="MemoryError", after=45),
        Fault("step.run", after=2),
        Fault("sampler.draw", after=1),
        Fault("step.execute", after=2),
    ],
    ids=lambda fault: f"{fault.point} {fault.after}",
)
def test_a_failure_anywhere_is_a_failed_step_which_is_tried_again(fault: Fault, llm: LLM, expected: Any) -> None:
    with inject(fault) as injected:
        assert answers(llm, PROMPTS, PARAMS) == expected
    assert injected.num_fired
    assert answers(llm, PROMPTS, PARAMS) == expected


def test_an_interrupted_step_can_be_made_again(llm: LLM, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, worker = llm.engine, llm.engine.executor._worker  # type: ignore[attr-defined]
    transfer = worker.cache_engine.transfer

    def interrupt(transfers: Any) -> None:
        monkeypatch.setattr(worker.cache_engine, "transfer", transfer)
        raise KeyboardInterrupt

    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    engine.step()
    monkeypatch.setattr(worker.cache_engine, "transfer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    done = {}
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
    assert [done[i] for i in range(3)] == [outputs for outputs, _, _ in expected]


def answers_again(llm: LLM) -> None:
    """The first failure is an answer of each request, the next one an exception."""
    for _ in range(2):
        answers(llm, PROMPTS, PARAMS)


def test_a_rank_that_computes_something_else_is_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = rank_process.Rank._compute

    def twice(self: Any, message: Any) -> None:
        batch = decode(message.batch, Batch)
        compute(self, Step(encode(Batch(batch.step, batch.sequences * 2))))

    monkeypatch.setattr(rank_process.Rank, "_compute", twice)
    with pytest.raises(EngineBrokenError):
        answers_again(llm)


def test_a_rank_that_hangs_or_sends_nonsense_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_threads():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks_executor, "PATIENCE_S", 0.3)  # of kernels that wait for each other
            llm = LLM(**RANKS)
            patch.setattr(links, "PATIENCE_S", 0.3)  # not while it loads
            fault = Fault("rank.step", "delay", seconds=1.5)
            with inject(fault), pytest.raises(EngineBrokenError, match="no progress"):
                answers_again(llm)
            llm.engine.executor.close()
        llm = LLM(**RANKS)
        monkeypatch.setattr(rank_process, "Done", lambda: Failed(7, None))  # type: ignore[arg-type]
        with inject(Fault("rank.step")), pytest.raises(EngineBrokenError, match="rank 1 sends nonsense"):
            answers_again(llm)
        llm.engine.executor.close()


def test_a_rank_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_worker(*given: Any) -> Any:
        raise OutOfMemoryError("there is none left")

    monkeypatch.setattr("quire.runner.worker.make_worker", make_worker)  # which only the other rank looks up there
    with in_threads(), pytest.raises(OutOfMemoryError, match="there is none left"):
        LLM(**RANKS)


# Ranks in processes


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: list[int]) -> None:
    limit_s = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < limit_s, "a rank stays behind"
        time.sleep(0.01)


def disturbances(part: str) -> pytest.MarkDecorator:
    """After how many tokens a part of an engine, or the engine, is killed or stopped. Each two of these three meet; all
    three do in thorough tests."""

    def case(after: int, whose: str, number: int, mark: str) -> Any:
        marks = [getattr(pytest.mark, mark)] if mark else []
        return pytest.param(after, whose, number, marks=marks, id=f"{after}-{whose}-{signal.Signals(number).name}")

    kill, stop = signal.SIGKILL, signal.SIGSTOP
    chosen = [(1, part, kill, ""), (20, part, stop, "slow"), (20, "engine", kill, "slow"), (1, "engine", stop, "slow")]
    others = [(21 - after, whose, number, "thorough") for after, whose, number, _ in chosen]
    return pytest.mark.parametrize(("after", "whose", "number"), [case(*each) for each in chosen + others])


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    args = EngineArgs(**RANKS)
    before, door_module.LIMIT_S = door_module.LIMIT_S, 180.0  # two processes start, one after the other
    made = Door(make=lambda: AsyncLLM.from_args(args, hang_timeout_s=8.0))
    yield made
    pid = made.llm.engine_pid
    assert pid is not None
    pids = children_of(pid)
    assert pids
    made.close()
    door_module.LIMIT_S = before
    wait_until_gone([pid, *pids])


async def restarted(door: Door, pid: int | None) -> None:
    while door.llm.engine_pid == pid or not door.llm.is_running:
        await asyncio.sleep(0.01)


@disturbances("rank")
def test_streams_go_on_when_a_rank_ends(door: Door, expected: Any, after: int, whose: str, number: int) -> None:
    requests = [({"prompt_token_ids": prompt}, its) for prompt, its in zip(PROMPTS, PARAMS, strict=True)]
    engine = door.llm.engine_pid
    assert engine is not None
    ranks = children_of(engine)
    door.record.events.clear()

    async def disturb() -> list[Any]:
        reading = asyncio.create_task(door.all_outputs(requests))
        await door.record.until(lambda: sum(num_tokens for _, num_tokens in door.record.of("tokens")) >= after)
        os.kill(ranks[0] if whose == "rank" else engine, number)
        return await reading

    got = door.run(disturb())
    assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
    door.run(restarted(door, engine))
    wait_until_gone([engine, *ranks])


def test_a_rank_that_ends_while_nothing_runs_ends_its_engine(door: Door) -> None:
    engine = door.llm.engine_pid
    assert engine is not None
    os.kill(children_of(engine)[0], signal.SIGKILL)
    door.run(restarted(door, engine))
    wait_until_gone([engine])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "reason"),
    [("kill", "rank 1 was ended by SIGKILL"), ("delay", "rank 1 made no progress for 8 s")],
    ids=["dies", "hangs"],
)
@pytest.mark.parametrize(
    "point",
    ["weights.load", "rank.step", "memory.workspace"],
    ids=["while it loads", "before a step", "within one, when the other gathers"],
)
def test_a_rank_that_ends_in_a_phase_breaks_an_engine_in_the_callers_process(
    point: str, action: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(links.ChildProcess):
        def __init__(self, *given: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment(Fault(point, action, after=2, seconds=600)).items():
                    patch.setenv(name, value)
                super().__init__(*given)

    patience_s = 8.0 if action == "delay" else 60.0
    monkeypatch.setattr(ranks_executor, "PATIENCE_S", patience_s)
    monkeypatch.setitem(executors.EXECUTORS, "ranks", partial(RanksExecutor, launch=Dying))
    forks.start()
    descriptors, children = len(os.listdir("/proc/self/fd")), children_of(os.getpid())
    if point == "weights.load":
        monkeypatch.setattr(links, "PATIENCE_S", patience_s)
        with pytest.raises(EngineBrokenError, match=reason):
            LLM(**RANKS)
    else:
        llm = LLM(**RANKS)
        monkeypatch.setattr(links, "PATIENCE_S", patience_s)
        with pytest.raises(EngineBrokenError, match=reason):
            answers_again(llm)
        llm.engine.executor.close()
    assert children_of(os.getpid()) == children
    assert len(os.listdir("/proc/self/fd")) <= descriptors
