"""Processes of other machines that are killed or stopped in each phase, while they load, before a step and within one
while machine 0 waits for them: the engine ends in time, and nothing is left on either machine."""

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from quire import LLM, EngineArgs
from quire.common import liveness
from quire.common.errors import EngineBrokenError
from quire.common.faults import Fault, environment
from quire.interfaces.launch import link
from quire.runner.parallel import links
from quire.runner.parallel.machines import node
from quire.runner.parallel.machines.node import part_of
from tests import forks
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.parallel.ends import REQUESTS, answers_again, is_gone, restarted, wait_until_gone
from tests.parallel.machines import BOTH, descendants
from tests.parallel.test_machine_ranks import served
from tests.parallel.test_nodes import InThread

__all__ = ["served"]
pytestmark = [needs_native, pytest.mark.slow]
LOADING_S = 15.0
"""How long a machine may be silent, or make no progress, while it loads. It is stopped then, so longer than it takes to
begin on a busy machine."""
SILENCE_S = 5.0
"""How long it may be silent later."""
SLACK_S = 20.0


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(
    ("divided", "point", "after"),
    [
        ("tensor_parallel_size", "weights.load", 2),
        ("tensor_parallel_size", "rank.step", 2),
        ("tensor_parallel_size", "memory.workspace", 230),
        ("pipeline_parallel_size", "weights.load", 2),
        ("pipeline_parallel_size", "stage.step", 2),
        ("pipeline_parallel_size", "memory.workspace", 100),
    ],
    ids=[f"{what} {phase}" for what in ("ranks", "stages") for phase in ("loading", "before a step", "within a step")],
)
def test_a_machine_that_ends_in_a_phase_breaks_the_engine_in_time(
    divided: str, point: str, after: int, action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {**BOTH, divided: 2}
    started = list[subprocess.Popen[bytes]]()

    def start_child(*given: Any) -> subprocess.Popen[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(Fault(point, action, after=after)).items():
                patch.setenv(name, value)
            started.append(links.start_child(*given))
        return started[-1]

    monkeypatch.setattr(node, "start_child", start_child)
    monkeypatch.setattr(links, "PATIENCE_S", LOADING_S)
    monkeypatch.setattr(liveness, "SILENCE_S", SILENCE_S)
    forks.start()
    descriptors, children = len(os.listdir("/proc/self/fd")), children_of(os.getpid())
    other = InThread(part_of(EngineArgs(**given, node_rank=1)))
    limit_s = LOADING_S if point == "weights.load" else SILENCE_S
    reason = rf"was silent for {limit_s:g} s|made no progress for {limit_s:g} s"
    if action == "kill":
        reason = "at 127.* has ended, or cannot be reached"
    began_s = time.monotonic()
    if point == "weights.load":
        with pytest.raises(EngineBrokenError, match=reason):
            LLM(**given)
    else:
        llm = LLM(**given)
        began_s = time.monotonic()
        with pytest.raises(EngineBrokenError, match=reason):
            answers_again(llm)
        llm.engine.executor.close()
    assert time.monotonic() - began_s < limit_s + SLACK_S
    assert other.result() is None, "this machine joins again"
    assert is_gone(started[0].pid)
    assert len(started) == 1
    del started[:]
    assert children_of(os.getpid()) == children
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_machine_joins_again_when_the_engines_process_ends_while_both_load(
    served: tuple[Door, int], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, machine = served
    engine, start = door.llm.engine_pid, link.start_process
    dying = list[int]()

    def start_dying(its: Any, variables: Any) -> Any:
        monkeypatch.setattr(link, "start_process", start)  # the next one does not
        process = start(its, environment(Fault("weights.load", "kill", after=2)))
        dying.append(process.pid)
        return process

    monkeypatch.setattr(link, "start_process", start_dying)
    assert engine is not None
    before = [engine, *children_of(engine), *descendants(machine)]
    os.kill(engine, signal.SIGKILL)
    door.run(restarted(door, engine))
    got = door.run(door.all_outputs(REQUESTS))
    assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
    wait_until_gone([*before, *dying])
    assert len(dying) == 1
    assert len(descendants(machine)) == 2
