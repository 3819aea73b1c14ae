"""Ranks that fail, die, hang or answer nonsense: steps are tried again, engines end and are replaced, nothing stays."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from quire import LLM, EngineArgs
from quire.common import liveness
from quire.common.batch import Batch, decode, encode
from quire.common.errors import EngineBrokenError, OutOfMemoryError
from quire.common.faults import Fault, environment, inject
from quire.interfaces.async_llm import supervisor
from quire.interfaces.launch import link
from quire.runner import executor as executors
from quire.runner.parallel import executor as ranks_executor
from quire.runner.parallel import links, rank_process, sender
from quire.runner.parallel.executor import RanksExecutor
from quire.runner.parallel.messages import Connection, Failed, Step
from tests import forks
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.parallel.ends import (
    PARAMS,
    PROMPTS,
    REQUESTS,
    TINY,
    answers_again,
    disturb_streams,
    disturb_while_idle,
    disturbances,
    door_of,
    idle_disturbances,
    in_any_place_of_a_step,
    is_gone,
    restarted,
    wait_until_gone,
)
from tests.parallel.ranks import answers, in_threads

pytestmark = needs_native
RANKS: dict[str, Any] = {**TINY, "tensor_parallel_size": 2, "num_threads": 1}
HANG_S = 8.0


@pytest.fixture
def llm() -> Iterator[LLM]:
    """Its second rank is a thread, so that faults of this process are its too."""
    with in_threads():
        made = LLM(**RANKS)
        yield made
        made.engine.executor.close()


@in_any_place_of_a_step
def test_a_failure_anywhere_is_a_failed_step_which_is_tried_again(fault: Fault, llm: LLM, expected: Any) -> None:
    with inject(fault) as injected:
        assert answers(llm, PROMPTS, PARAMS) == expected
    assert injected.num_fired
    assert answers(llm, PROMPTS, PARAMS) == expected


def test_a_pass_of_drafts_that_fails_in_rank_0_alone_does_not_mix_with_the_next_step() -> None:
    """The draft model has the model's widths, so parts of its passes look like those of the model's chunks."""
    prompt, params = [[(i * 37) % 500 + 3 for i in range(100)]], PARAMS[:1]
    small = {**TINY, "max_model_len": 160, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    expected = answers(LLM(**small), prompt, params)
    with in_threads():
        drafting = {"method": "draft_model", "model": "quire-tiny", "num_speculative_tokens": 3, "adaptive": False}
        llm = LLM(**small, tensor_parallel_size=2, num_threads=1, speculative_config=drafting)
        passes = llm.engine.executor._worker._drafts._passes  # type: ignore[attr-defined]
        logits, left = passes.logits, [0]

        def fails_once(sequences: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError
            return logits(sequences)

        passes.logits = fails_once
        for number in range(1, 12):
            llm.engine.blocks.forget_cached()
            left[0] = number
            for _ in range(2):  # the second finds what the first has cached
                assert answers(llm, prompt, params) == expected, number
            assert left[0] < 0
            llm.engine.requests.check_integrity()
        assert llm.engine.stats().drafts
        llm.engine.executor.close()


def test_an_interrupted_step_can_be_made_again(llm: LLM, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, worker = llm.engine, llm.engine.executor._worker  # type: ignore[attr-defined]
    run = worker.runner.run

    def interrupt(batch: Any) -> None:
        monkeypatch.setattr(worker.runner, "run", run)
        raise KeyboardInterrupt

    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    engine.step()
    monkeypatch.setattr(worker.runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    done = {}
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
    assert [done[i] for i in range(3)] == [outputs for outputs, _, _ in expected]


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


def test_a_rank_that_still_loads_may_lose_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_BEAT_S", 0)
    with socket.socket(socket.AF_UNIX) as unconnected:
        sender.Sender(Connection(unconnected), "rank")._beat(threading.Event())


def test_a_rank_that_falls_silent_while_nothing_runs_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    is_lost = threading.Event()
    monkeypatch.setattr(liveness, "on_loss", is_lost.set)
    monkeypatch.setattr(sender, "_BEAT_S", 0.05)
    with in_threads():
        llm = LLM(**RANKS)
        monkeypatch.setattr(liveness, "SILENCE_S", 1.0)
        monkeypatch.setattr(liveness, "_LEAST_SILENCE_S", 1.0)
        assert not is_lost.wait(2.0)  # while it shows that it lives
        monkeypatch.setattr(sender, "_BEAT_S", 1000.0)
        assert is_lost.wait(60)
        with pytest.raises(EngineBrokenError, match="rank 1 was silent for 1 s"):
            answers_again(llm)
        llm.engine.executor.close()


# Ranks in processes


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    delay_s, supervisor.MAX_DELAY_S = supervisor.MAX_DELAY_S, supervisor.FIRST_DELAY_S  # after each of many ends
    with door_of(EngineArgs(**RANKS), HANG_S) as made:
        yield made
    supervisor.MAX_DELAY_S = delay_s


@disturbances("rank")
def test_streams_go_on_when_a_rank_ends(door: Door, expected: Any, after: int, whose: str, number: int) -> None:
    disturb_streams(door, expected, after, whose, number)


@idle_disturbances
def test_a_rank_that_ends_while_nothing_runs_ends_its_engine(
    door: Door, expected: Any, is_engine: bool, number: int
) -> None:
    disturb_while_idle(door, number, expected, is_engine=is_engine, limit_s=HANG_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("step.start", "kill"),
        ("rank.step", "stop"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ("step.start", "stop"),
                ("rank.step", "kill"),
                ("weights.load", "kill"),
                ("weights.load", "stop"),
                ("memory.workspace", "kill"),
                ("memory.workspace", "stop"),
            ]
        ),
    ],
)
def test_an_engine_is_replaced_in_each_phase_in_which_ranks_end(
    door: Door, point: str, action: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that pass the point: rank 0, when it plans, another rank, or all."""
    start, dying = link.start_process, list[int]()

    def start_dying(its: Any, variables: Any) -> Any:
        monkeypatch.setattr(link, "start_process", start)  # the next one does not
        fault = Fault(point, action, after={"weights.load": 2, "memory.workspace": 230}.get(point, 4))
        process = start(its, environment(fault))
        dying.append(process.pid)
        return process

    monkeypatch.setattr(link, "start_process", start_dying)
    engine = door.llm.engine_pid
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    door.run(restarted(door, engine))
    ranks = children_of(dying[0])
    assert is_gone(dying[0]) is (point == "weights.load")
    got = door.run(door.all_outputs(REQUESTS))
    assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
    door.run(restarted(door, dying[0]))
    wait_until_gone([engine, *dying, *ranks])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("kill", "rank 1 was ended by SIGKILL"),
        ("delay", "rank 1 made no progress for 8 s"),
        pytest.param("stop", "rank 1 (made no progress|was silent) for 8 s", marks=pytest.mark.thorough),
    ],
    ids=["dies", "hangs", "is stopped"],
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

    patience_s = 60.0 if action == "kill" else 8.0
    monkeypatch.setattr(liveness, "SILENCE_S", 8.0)
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
