"""Engines of several processes, parts of which fail, are killed or stopped, and what must come of it."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.common.faults import Fault
from tests.async_llm import door as door_module
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.parallel.ranks import answers

PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 200, 300] * 9, [7] * 3]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True, logprobs=1) for i in range(3)]
REQUESTS = [({"prompt_token_ids": prompt}, its) for prompt, its in zip(PROMPTS, PARAMS, strict=True)]
TINY: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 40}
SLACK_S = 5.0

in_any_place_of_a_step = pytest.mark.parametrize(
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
"""Faults of an engine with ranks."""


def answers_again(llm: LLM) -> None:
    """The first failure is an answer of each request, the next one an exception."""
    for _ in range(2):
        answers(llm, PROMPTS, PARAMS)


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


@contextmanager
def door_of(args: EngineArgs, hang_timeout_s: float) -> Iterator[Door]:
    """An engine of several processes, of which none is left at the end."""
    before, door_module.LIMIT_S = door_module.LIMIT_S, 180.0  # two processes start, one after the other
    made = Door(make=lambda: AsyncLLM.from_args(args, hang_timeout_s=hang_timeout_s))
    yield made
    pid = made.llm.engine_pid
    assert pid is not None
    pids = children_of(pid)
    assert pids
    made.close()
    door_module.LIMIT_S = before
    wait_until_gone([pid, *pids])


async def ended(door: Door, limit_s: float) -> None:
    """Until health reports that the engine does not run, which it must in time."""
    began_s = time.monotonic()
    while door.llm.death is None:
        assert time.monotonic() < began_s + limit_s + SLACK_S, "it is not noticed"
        await asyncio.sleep(0.01)
    assert "the engine is not running" in str(door.llm.death)


async def restarted(door: Door, pid: int | None) -> None:
    while door.llm.engine_pid == pid or not door.llm.is_running:
        await asyncio.sleep(0.01)


def disturb_streams(door: Door, expected: Any, after: int, whose: str, number: int) -> None:
    """The streams must go on with the next engine."""
    engine = door.llm.engine_pid
    assert engine is not None
    parts = children_of(engine)
    door.record.events.clear()

    async def disturb() -> list[Any]:
        reading = asyncio.create_task(door.all_outputs(REQUESTS))
        await door.record.until(lambda: sum(num_tokens for _, num_tokens in door.record.of("tokens")) >= after)
        os.kill(engine if whose == "engine" else parts[0], number)
        return await reading

    got = door.run(disturb())
    assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
    door.run(restarted(door, engine))
    wait_until_gone([engine, *parts])


idle_disturbances = pytest.mark.parametrize(
    ("is_engine", "number"),
    [
        pytest.param(False, signal.SIGKILL, id="killed"),
        pytest.param(False, signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
        pytest.param(True, signal.SIGKILL, id="engine-killed", marks=pytest.mark.slow),
        pytest.param(True, signal.SIGSTOP, id="engine-stopped", marks=pytest.mark.slow),
    ],
)
"""What happens to a part of an engine, or to the engine, while nothing runs."""


def disturb_while_idle(door: Door, number: int, expected: Any, *, is_engine: bool, limit_s: float) -> None:
    """The engine must end in time though nothing is asked of it, health must say so, and the next one must answer."""
    door.run(door.all_outputs(REQUESTS))
    door.run(door.drained())
    engine = door.llm.engine_pid
    assert engine is not None
    parts = children_of(engine)
    os.kill(engine if is_engine else parts[0], number)
    door.run(ended(door, limit_s))
    door.run(restarted(door, engine))
    assert door.llm.death is None
    got = door.run(door.all_outputs(REQUESTS))
    assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
    wait_until_gone([engine, *parts])
