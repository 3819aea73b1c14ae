"""Which processes are taken for hanging: over programs that speak as an engine process does."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from queue import Empty
from typing import Any

import msgspec
import pytest

import quire
from quire import EngineArgs, EngineDeadError, SamplingParams
from quire.common import liveness
from quire.engine.process.engine_process import EngineProcess
from quire.engine.process.heartbeat import HEARTBEAT_S, Pulse, beat
from quire.engine.process.messages import AddRequest, Heartbeat, read_frame
from quire.interfaces.async_llm import engine_client
from quire.interfaces.async_llm.engine_client import EngineClient
from quire.interfaces.launch import link
from quire.kernels.checks import KERNEL_ERRORS

from ..scripted_engine import scripted_llm

TIMEOUT_S = 2.0
"""Longer than the machine that runs the tests may be stalled for."""
PROGRAM = """
import socket, sys, time
from quire.engine.process.messages import Heartbeat, Ready, to_frame
from quire.common.outputs import EngineStats
client = socket.socket(fileno=int(sys.argv[1]))
LONG = 60
counts = {name: {} if "dict" in field.type else 0 for name, field in EngineStats.__dataclass_fields__.items()}
def beats(progress, is_busy, count):
    for i in range(count):
        client.sendall(to_frame(Heartbeat(progress(i), is_busy)))
        time.sleep(0.05)
def ready():
    client.sendall(to_frame(Ready(64, EngineStats(**counts))))
def silence():
    client.recv(1 << 20)
    client.recv(1)
"""
LIVE = {
    "idle": "ready(); beats(lambda i: 0, False, LONG)",
    "busy and getting on": "ready(); beats(lambda i: i, True, LONG)",
    "busy for a short while": "ready(); beats(lambda i: i // 10, True, LONG)",
    "loading for long": "beats(lambda i: 0, False, LONG); ready()",
}
HANG = {
    "silent": ("ready(); silence()", "was silent for 2 s"),
    "busy and stuck": ("ready(); beats(lambda i: 7, True, 400)", "made no progress for 2 s"),
    "stuck after a while": ("ready(); beats(lambda i: min(i, 9), True, 400)", "made no progress for 2 s"),
}


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the next engine processes, one after another, run these programs instead."""
    source = str(Path(quire.__file__).parents[1])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([source, *filter(None, sys.path)]))

    def speak(*programs: str) -> None:
        left = list(programs)

        def start(its: Any, variables: Any) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", f"{PROGRAM}\n{left.pop(0)}\nsys.exit(7)", str(its.fileno())]
            return subprocess.Popen(command, pass_fds=[its.fileno()], env=environment)

        monkeypatch.setattr(link, "start_process", start)

    monkeypatch.setattr(engine_client, "_TICK_S", 0.05)
    monkeypatch.setattr(engine_client, "LOADING_PATIENCE", 60)  # a loaded machine takes long to start five processes
    return speak


def ends(*hang_timeouts_s: float | None) -> list[str]:
    """How processes end that are started side by side."""

    async def run(hang_timeout_s: float | None) -> str:
        client = await EngineClient.start(EngineArgs(), hang_timeout_s)
        await client.read()
        return await client.end()

    async def run_all() -> list[str]:
        return await asyncio.gather(*map(run, hang_timeouts_s))

    return asyncio.run(asyncio.wait_for(run_all(), 60))


def test_a_process_that_makes_progress_or_is_idle_is_not_killed(speaking: Callable[..., None]) -> None:
    stuck = "ready(); beats(lambda i: 7, True, LONG)"
    speaking(*LIVE.values(), stuck)
    ended = ends(*[TIMEOUT_S] * len(LIVE), None)
    assert dict(zip([*LIVE, "without a limit"], ended, strict=True)) == dict.fromkeys(
        [*LIVE, "without a limit"], "its process ended with status 7"
    )


def test_a_process_that_hangs_is_killed(speaking: Callable[..., None]) -> None:
    speaking(*(program for program, _ in HANG.values()))
    assert ends(*[TIMEOUT_S] * len(HANG)) == [f"its process {cause}" for _, cause in HANG.values()]


def test_one_that_is_silent_while_it_loads_is_given_more_time_but_not_for_ever(
    speaking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking("silence()")
    monkeypatch.setattr(engine_client, "LOADING_PATIENCE", 3)
    with pytest.raises(EngineDeadError, match=r"was silent for 1\.5 s"):
        ends(0.5)


def test_a_client_that_was_itself_stopped_does_not_kill_the_engine(speaking: Callable[..., None]) -> None:
    speaking("ready(); beats(lambda i: i, True, LONG)")

    async def run() -> str:
        client = await EngineClient.start(EngineArgs(), TIMEOUT_S)
        reading = asyncio.create_task(client.read())
        await asyncio.sleep(0)
        stopped = threading.Event()
        threading.Timer(1.5 * TIMEOUT_S, stopped.set).start()
        stopped.wait()  # the event loop and all in it
        await reading
        return await client.end()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == "its process ended with status 7"


# What an engine process says of itself


class _EnoughError(Exception):
    pass


def heartbeats(pulse: Pulse, *events: Callable[[], object]) -> list[Heartbeat]:
    """What is sent before, between and after the events."""
    sent: list[Heartbeat] = []
    left = list(events)

    def wait(seconds: float) -> None:
        assert seconds == HEARTBEAT_S
        if not left:
            raise _EnoughError
        left.pop(0)()

    with pytest.raises(_EnoughError):
        beat(lambda frame: sent.append(msgspec.msgpack.decode(read_frame(BytesIO(frame)), type=Heartbeat)), pulse, wait)
    return sent


def changes(sent: list[Heartbeat]) -> list[bool]:
    return [after.progress != before.progress for before, after in pairwise(sent)]


def use_cpu() -> None:
    end_s = os.times().user + os.times().system + 0.05
    while os.times().user + os.times().system < end_s:
        pass


def test_turns_and_kernels_are_progress_and_time_is_not() -> None:
    pulse = Pulse()

    def turn() -> None:
        pulse.num_turns += 1

    def call_a_kernel() -> None:
        with KERNEL_ERRORS:
            pass

    assert changes(heartbeats(pulse, turn, lambda: None, call_a_kernel, use_cpu)) == [True, False, True, False]


def test_a_long_kernel_reports_progress_while_it_computes() -> None:
    before = liveness.num_kernel_events
    with KERNEL_ERRORS:
        assert liveness.num_kernel_events % 2 == 1
        assert changes(heartbeats(Pulse(), use_cpu, lambda: None, use_cpu)) == [True, False, True]
    assert liveness.num_kernel_events == before + 2


def test_the_step_loop_is_busy_while_there_is_anything_to_step() -> None:
    llm, executor = scripted_llm()
    pulse, told = Pulse(), list[tuple[str, bool, int]]()
    params = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)))
    messages: list[Any] = [None, AddRequest(1, "a", [5], "", 0.0, False, params)]

    class Inbox:
        def get(self, timeout: float | None) -> Any:
            told.append(("wait", pulse.is_busy, pulse.num_turns))
            return messages.pop()

        def get_nowait(self) -> Any:
            raise Empty

    executor.before_step = lambda step: told.append(("step", pulse.is_busy, pulse.num_turns))
    inbox: Any = Inbox()
    EngineProcess(llm.engine, inbox, lambda frame: None, pulse=pulse).run()
    assert told == [("wait", False, 1), ("step", True, 1), ("step", True, 2), ("wait", False, 3)]
