"""Stages that fail, die, hang or send nonsense: steps are tried again, engines end and are replaced, nothing stays."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, LoRARequest
from quire.common import liveness
from quire.common.batch import Batch, encode
from quire.common.errors import EngineBrokenError, OutOfMemoryError
from quire.common.faults import Fault, environment, inject
from quire.runner import executor as executors
from quire.runner.memory_plan import plan_memory
from quire.runner.parallel import links, sender
from quire.runner.parallel.configs import to_bytes
from quire.runner.parallel.messages import Connection, Failed, Start
from quire.runner.parallel.pipeline import stage_process
from quire.runner.parallel.pipeline.executor import PipelineExecutor
from quire.runner.parallel.pipeline.messages import FROM_STAGE, StageStep, States
from tests import forks
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter
from tests.parallel.ends import (
    PARAMS,
    PROMPTS,
    TINY,
    answers_again,
    disturb_streams,
    disturb_while_idle,
    disturbances,
    door_of,
    idle_disturbances,
)
from tests.parallel.ranks import ThreadStage, answers, in_threads
from tests.parallel.test_nodes import close

pytestmark = needs_native
STAGES: dict[str, Any] = {**TINY, "pipeline_parallel_size": 2, "num_threads": 1}


@pytest.fixture
def make() -> Iterator[Callable[..., LLM]]:
    """Engines whose other stages are threads, so that faults of this process are theirs too."""
    made = list[LLM]()
    with in_threads():

        def make(**given: Any) -> LLM:
            made.append(LLM(**STAGES | given))
            return made[-1]

        yield make
        for llm in made:
            llm.engine.executor.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("stage.step", after=3),
        Fault("stage.step", error="MemoryError", times=2),
        Fault("memory.workspace", error="MemoryError", after=40),
        Fault("step.run", after=2),
        Fault("step.run", after=3),
        Fault("sampler.draw", after=1),
        Fault("step.execute", after=2),
        Fault("step.commit", after=2),
    ],
    ids=lambda fault: f"{fault.point} {fault.after}",
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_failure_anywhere_is_a_failed_step_which_is_tried_again(
    num_stages: int, fault: Fault, make: Callable[..., LLM], expected: Any
) -> None:
    llm = make(pipeline_parallel_size=num_stages)
    with inject(fault) as injected:
        assert answers(llm, PROMPTS, PARAMS) == expected
    assert injected.num_fired
    assert answers(llm, PROMPTS, PARAMS) == expected
    llm.engine.requests.check_integrity()


def test_a_request_that_cannot_be_planned_ends_alone_while_others_are_in_flight(
    make: Callable[..., LLM], expected: Any
) -> None:
    llm = make()
    with inject(Fault("blocks.append", after=3)) as injected:
        got = answers(llm, PROMPTS, PARAMS)
    assert injected.num_fired
    assert [error is None for _, _, error in got] == [True, False, True]
    assert (got[0], got[2]) == (expected[0], expected[2])
    llm.engine.requests.check_integrity()


def test_an_interrupted_step_can_be_made_again(
    make: Callable[..., LLM], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make().engine
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    engine.step()

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(links.Links, "states", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    done = {}
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
    assert [done[i] for i in range(3)] == [outputs for outputs, _, _ in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: States(s.number, s.num_rows, "float64", s.tensors), "rows of float64 in"),
        (lambda s: States(s.number, s.num_rows, s.dtype, s.tensors[:1]), "rows of bfloat16 in"),
        (lambda s: States(s.number, s.num_rows - 1, s.dtype, s.tensors), "rows of bfloat16 in"),
        (lambda s: States(s.number, -1, s.dtype, []), "-1 rows of bfloat16 in"),
        (lambda s: States(s.number, 10**9, s.dtype, []), "1000000000 rows of bfloat16 in"),
        (lambda s: States(s.number, 0, s.dtype, [memoryview(b"")] * 2), "a stage computed 0 rows of"),
        (lambda s: States(s.number, s.num_rows, s.dtype, [memoryview(bytes(2**26))]), "a frame of 67108[0-9]+ bytes"),
        (lambda s: Start(1, b""), "Invalid value 'Start'"),
    ],
)
def test_a_stage_that_sends_nonsense_ends_the_engine(
    change: Callable[[States], Any], message: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    send = sender.Sender.send
    monkeypatch.setattr(sender.Sender, "send", lambda self, m: send(self, change(m) if isinstance(m, States) else m))
    with pytest.raises(EngineBrokenError, match=message):
        answers_again(llm)


def test_a_stage_that_hangs_in_a_step_ends_the_engine(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    monkeypatch.setattr(links, "PATIENCE_S", 0.3)
    with inject(Fault("stage.step", "delay", seconds=1.5)), pytest.raises(EngineBrokenError, match="no progress"):
        answers_again(llm)


def test_a_stage_that_falls_silent_while_nothing_runs_ends_the_engine(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_lost = threading.Event()
    monkeypatch.setattr(liveness, "on_loss", is_lost.set)
    monkeypatch.setattr(sender, "_BEAT_S", 0.05)
    llm = make()
    monkeypatch.setattr(liveness, "SILENCE_S", 0.3)
    monkeypatch.setattr(sender, "_BEAT_S", 1000.0)  # after one more beat, from which on the limit counts
    assert is_lost.wait(60)
    with pytest.raises(EngineBrokenError, match=r"stage 0 was silent for 0\.3 s"):
        answers_again(llm)


def test_a_stage_reads_the_states_of_the_steps_that_follow_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of long prompts takes longer than a link between machines may take nothing."""
    may_end = threading.Event()

    class Slow:
        def execute(self, *_: Any) -> None:
            assert may_end.wait(60)

        def states(self) -> list[bytes]:
            return []

        def close(self) -> None: ...

    monkeypatch.setattr(executors, "make_stage", lambda *_: Slow())
    plan = plan_memory(EngineArgs(**STAGES))
    ours, its = socket.socketpair()
    ours.settimeout(10.0)
    stage, engine = ThreadStage(its), Connection(ours)
    engine.send(Start(1, to_bytes(plan.config, plan.kv_cache)))
    for number in range(3):
        engine.send(StageStep(number, encode(Batch(number, ()))))
    for number in range(3):
        engine.send(States(number, 0, plan.config.model.dtype, [memoryview(bytes(2**22))]))
    may_end.set()
    computed = list[int]()
    while len(computed) < 3:
        message = engine.receive(FROM_STAGE)
        assert message is not None
        computed += [message.number] if isinstance(message, States) else []
    assert computed == [0, 1, 2]
    close(ours, its)
    stage.end()


def test_a_stage_that_cannot_load_says_why(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    compute = stage_process._compute

    def failing(*given: Any) -> None:
        def make_stage(*_: Any) -> Any:
            raise OutOfMemoryError("there is none left")

        monkeypatch.setattr(executors, "make_stage", make_stage)  # which the engine's process has looked up already
        compute(*given)

    monkeypatch.setattr(stage_process, "_compute", failing)
    with pytest.raises(OutOfMemoryError, match="there is none left"):
        make()


def test_an_adapter_that_a_stage_cannot_load_is_loaded_in_none(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(enable_lora=True)
    write_adapter(tmp_path, make_tensors(tiny_sizes(llm.engine.model_config), 2, seed=1), r=2, lora_alpha=2)
    unloaded = list[int]()
    unload = PipelineExecutor.unload_adapter

    def note(self: PipelineExecutor, slot: int) -> None:
        unloaded.append(slot)
        unload(self, slot)

    def refuse(self: Any, *_: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(PipelineExecutor, "unload_adapter", note)
        self.send(Failed("CheckpointError", "it is not on this machine"))

    monkeypatch.setattr(sender.Sender, "change_adapters", refuse)
    adapter = LoRARequest("a", 1, str(tmp_path))
    (output,) = llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False, lora_request=adapter)
    assert output.error is not None
    assert "it is not on this machine" in output.error
    assert unloaded == [0]
    (output,) = llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False, lora_request=adapter)
    assert output.error is None


# Stages in processes


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with door_of(EngineArgs(**STAGES), 12.0) as made:
        yield made


@disturbances("stage")
def test_streams_go_on_when_a_stage_ends(door: Door, expected: Any, after: int, whose: str, number: int) -> None:
    disturb_streams(door, expected, after, whose, number)


@idle_disturbances
def test_a_stage_that_ends_while_nothing_runs_ends_its_engine(
    door: Door, expected: Any, is_engine: bool, number: int
) -> None:
    disturb_while_idle(door, number, expected, is_engine=is_engine, limit_s=12.0)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["weights.load", "stage.step"])
def test_a_stage_that_dies_in_a_phase_breaks_an_engine_in_the_callers_process(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(links.StageProcess):
        def __init__(self, *given: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment(Fault(point, "kill", after=2)).items():
                    patch.setenv(name, value)
                super().__init__(*given)

    pipeline = partial(PipelineExecutor, executors.make_stage, launch=Dying)
    monkeypatch.setitem(executors.EXECUTORS, "pipeline", pipeline)
    forks.start()
    descriptors, children = len(os.listdir("/proc/self/fd")), children_of(os.getpid())
    if point == "weights.load":
        with pytest.raises(EngineBrokenError, match="stage 0 was ended by SIGKILL"):
            LLM(**STAGES)
    else:
        llm = LLM(**STAGES)
        with pytest.raises(EngineBrokenError, match="stage 0 was ended by SIGKILL"):
            answers(llm, PROMPTS, PARAMS)
        llm.engine.executor.close()
    assert children_of(os.getpid()) == children
    assert len(os.listdir("/proc/self/fd")) <= descriptors
