"""Engine processes that are killed and stopped: requests go on, nobody is left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import AsyncLLM, BeamSearchParams, EngineArgs, EngineDeadError, SamplingParams, StructuredOutputsParams
from quire.common.faults import Fault, environment
from quire.interfaces.async_llm import engine_client

from .door import Door
from .wanted import told, whole

ARGS: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_num_seqs": 16, "num_threads": 1}
LIMIT_MS = 20_000
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, output_kind="delta")
FORM = StructuredOutputsParams(regex="[a-z ]{90}")
KINDS: dict[str, tuple[Any, Any]] = {
    "greedy": ("def f(", GREEDY),
    "seeded": ("Once", SamplingParams(seed=3, max_tokens=60, ignore_eos=True, logprobs=2, output_kind="delta")),
    "penalties": ("a", SamplingParams(seed=4, max_tokens=60, min_tokens=50, frequency_penalty=1.0, prompt_logprobs=1)),
    "samples": ("import", SamplingParams(n=3, seed=5, max_tokens=40, ignore_eos=True, output_kind="delta")),
    "best": ("x", SamplingParams(n=1, best_of=2, seed=5, max_tokens=40, ignore_eos=True)),
    "beams": ("for i in", BeamSearchParams(3, 40, ignore_eos=True)),
    "grammar": (
        "a",
        SamplingParams(seed=6, structured_outputs=StructuredOutputsParams(regex="[a-z ]{90}"), max_tokens=60),
    ),
}


def door_of(hang_timeout_s: float | None = 8.0) -> Door:
    return Door(make=lambda: AsyncLLM.from_args(EngineArgs(**ARGS), hang_timeout_s=hang_timeout_s))


@pytest.fixture(scope="module")
def shared() -> Iterator[Door]:
    """The shortest that the heartbeats of an engine allow."""
    door = door_of(3.0)
    yield door
    door.close()


@pytest.fixture
def door(shared: Door) -> Iterator[Door]:
    shared.record.events.clear()
    yield shared
    shared.run(shared.drained())
    assert len(shared.record.of("start")) == len(shared.record.of("end"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_that_run_when_the_engine_dies_are_emitted_to_their_end(door: Door, number: int) -> None:
    llm = door.llm
    alone = door.run(door.all_outputs(list(KINDS.values())))
    door.record.events.clear()
    num_restarts, num_replayed = llm.num_restarts, llm.num_replayed

    async def interrupt() -> tuple[list[Any], int]:
        reading = asyncio.create_task(door.all_outputs(list(KINDS.values())))
        await door.record.until(lambda: len(door.record.of("tokens")) >= 4 * len(KINDS))
        pid = llm.engine_pid
        os.kill(pid, number)
        while llm.is_running:  # what the engine sent before counts; the next one takes longer to start than a tick
            await asyncio.sleep(0.01)
        num_left = len(door.record.of("start")) - len(door.record.of("end"))
        got = await reading
        assert llm.is_running
        assert llm.engine_pid != pid
        return got, num_left

    got, num_left = door.run(interrupt())
    for (name, (_, params)), before, after in zip(KINDS.items(), alone, got, strict=True):
        kind = getattr(params, "output_kind", "final_only")
        assert told(whole(after, kind)) == told(whole(before, kind)), name
    assert llm.num_restarts == num_restarts + 1
    assert llm.num_replayed == num_replayed + num_left
    assert num_left > 0


def test_requests_that_come_meanwhile_are_refused_with_the_reason(door: Door) -> None:
    async def kill() -> None:
        os.kill(door.llm.engine_pid, signal.SIGKILL)
        while door.llm.is_running:
            await asyncio.sleep(0)
        with pytest.raises(EngineDeadError) as refused:
            await door.outputs("a", GREEDY)
        assert refused.value.retry_after_s >= 1
        while "signal 9" not in str(door.llm.death):
            await asyncio.sleep(0)
        assert "another is being started" in str(door.llm.death)
        waiting = door.llm.generate("a", GREEDY, "one that waits", holds=True)
        assert [output.finished async for output in waiting][-1]
        assert door.llm.is_running
        assert (await door.outputs("a", GREEDY))[-1].finished

    door.run(kill())


def test_a_request_that_kills_engines_ends_and_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(Fault("engine.take", "kill", times=None, subject="poison")).items():
        monkeypatch.setenv(name, value)
    door = door_of()

    async def poison() -> None:
        with pytest.raises(EngineDeadError, match="signal 9"):
            await anext(door.llm.generate("a", GREEDY, request_id="poison"))
        while not door.llm.is_running:
            await asyncio.sleep(0.01)
        assert door.llm.num_restarts == 2
        assert (await door.outputs("a", GREEDY))[-1].finished

    try:
        door.run(poison())
    finally:
        door.close()


@pytest.mark.slow
def test_an_engine_that_hangs_over_a_request_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(Fault("engine.take", "delay", seconds=600, subject="endless")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine_client, "LOADING_PATIENCE", 20)  # a loaded machine takes long to start an engine
    door = door_of(3.0)

    async def hang() -> None:
        with pytest.raises(EngineDeadError, match="made no progress for 3 s"):
            await anext(door.llm.generate("a", GREEDY, request_id="endless"))
        while not door.llm.is_running:
            await asyncio.sleep(0.01)
        assert (await door.outputs("a", GREEDY))[-1].finished

    try:
        door.run(hang())
    finally:
        door.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "fault",
    [
        Fault("engine.send", "write", error="ECONNRESET", after=12),
        Fault("engine.send", after=12),
        Fault("engine.receive", subject="AddRequest"),
        Fault("engine.take", "exit", status=3),
    ],
    ids=lambda fault: f"{fault.point} {fault.action}",
)
def test_what_goes_wrong_between_the_processes_is_a_death(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Each engine process has the fault, so that the second one ends the request."""
    for name, value in environment(fault).items():
        monkeypatch.setenv(name, value)
    door = door_of()

    async def ask() -> None:
        outputs = await asyncio.gather(door.outputs("a", GREEDY), return_exceptions=True)
        assert isinstance(outputs[0], EngineDeadError), outputs
        assert door.llm.num_restarts >= 1

    try:
        door.run(ask())
    finally:
        door.close()


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def wait_for_end(pids: list[int]) -> None:
    """Of all these processes."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(LIMIT_MS), f"process {pid} has not ended"
        os.close(descriptor)


SERVER = (
    "import asyncio, os, sys\n"
    "from quire import AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams\n"
    "async def run():\n"
    "    llm = await AsyncLLM.from_args(EngineArgs(num_gpu_blocks_override=16, num_threads=1))\n"
    "    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=['yes', 'no']))\n"
    "    assert [output async for output in llm.generate('a', params, request_id='a')][-1].finished\n"
    "    os.write(1, b'%d\\n' % llm.engine_pid)\n"
    "    await asyncio.sleep(600)\n"
    "asyncio.run(run())\n"
)


@pytest.fixture
def client() -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], int, list[int]]]]:
    """Starts a process with an engine; gives it, the engine, and the processes that try its grammars."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], int, list[int]]:
        source = str(Path(quire.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, sys.path)])
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=path)
        )
        started.append(process)
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        return process, engine, children_of(engine)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_who_kills_a_server_kills_its_children(client: Any, is_stopped: bool) -> None:
    process, engine, trials = client()
    assert len(trials) == 1
    if is_stopped:  # they could not notice anything themselves
        for pid in (engine, *trials):
            os.kill(pid, signal.SIGSTOP)
    process.kill()
    wait_for_end([engine, *trials])


def test_who_kills_an_engine_kills_its_children(client: Any) -> None:
    _, engine, trials = client()
    assert len(trials) == 1
    for pid in trials:
        os.kill(pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    wait_for_end([engine, *trials])
