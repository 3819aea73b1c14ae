"""Engines on several machines, as loopback addresses: equal bits, too little memory, links and stages that end."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineArgs
from quire.common import liveness
from quire.common.errors import CheckpointError, EngineBrokenError, OutOfMemoryError
from quire.config.model import ModelConfig
from quire.runner.parallel import sender
from quire.runner.parallel.machines.node import Own
from quire.runner.parallel.machines.nodes import fingerprint, join
from quire.runner.parallel.pipeline import stage_process
from tests.async_llm import door as door_module
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.parallel.ends import PARAMS, PROMPTS, REQUESTS, restarted, wait_until_gone
from tests.parallel.machines import BOTH, Link, allow_a_second_of_silence, node_process, run_on
from tests.parallel.ranks import answers, in_threads
from tests.parallel.test_nodes import HOST, PORT, InThread, machine, secret

__all__ = ["secret"]
pytestmark = needs_native


def distant_stage(address: tuple[str, int], **own: Any) -> InThread:
    """A machine in a thread, which connects to this address."""

    def run() -> None:
        config = ModelConfig.resolve(None)
        sock = join(machine(1, host=address[0], port=address[1]), fingerprint(config))
        mine = {"node_rank": 1, "path": str(config.path), "num_threads": 1, "cpus": (), "memory_limit_bytes": None}
        with sock, suppress(OSError):
            stage_process.serve(sock, Own(**mine | own), pins=False)

    return InThread(run)


TWO: dict[str, Any] = {**BOTH, "pipeline_parallel_size": 2}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_machines_give_the_bits_of_one_process(num_ranks: int, expected: Any) -> None:
    with in_threads():
        for _ in range(2):  # the port is free again
            other = distant_stage((HOST, PORT))
            llm = LLM(**TWO, tensor_parallel_size=num_ranks)
            assert answers(llm, PROMPTS, PARAMS) == expected
            llm.engine.executor.close()
            assert other.result() is None


def test_a_machine_with_too_little_memory_says_so() -> None:
    with in_threads():
        other = distant_stage((HOST, PORT), memory_limit_bytes=10**6)
        message = r"machine 1: its stage of the layers 0 to 3 needs .* with a KV cache of .* has 976.56 KiB: lower kv_"
        with pytest.raises(OutOfMemoryError, match=message):
            LLM(**TWO)
        other.result()


def test_what_a_machine_cannot_load_is_reported_with_its_number() -> None:
    with in_threads():
        other = distant_stage((HOST, PORT), path="/nonexistent")
        with pytest.raises(CheckpointError, match=r"^machine 1: .*/nonexistent"):
            LLM(**TWO)
        other.result()


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("limit", [(liveness, "SILENCE_S"), (liveness, "hang_timeout_s")], ids=["own", "the engine's"])
def test_a_link_that_is_interrupted_ends_the_engine(
    is_idle: bool, limit: tuple[Any, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_BEAT_S", 0.1)
    is_lost = threading.Event()
    monkeypatch.setattr(liveness, "on_loss", is_lost.set)
    with in_threads():
        link = Link()
        distant_stage(link.address)
        llm = LLM(**TWO)
        engine = llm.engine
        if is_idle:
            assert answers(llm, PROMPTS, PARAMS) == expected
            allow_a_second_of_silence(monkeypatch, limit)
            link.interrupt()
            assert is_lost.wait(60)
        else:
            engine.add_request("0", PROMPTS[0], PARAMS[0])
            engine.step()
            allow_a_second_of_silence(monkeypatch, limit)
            link.interrupt()
        with pytest.raises(EngineBrokenError, match="stage 0 was silent for 1 s"):
            run_on(engine)
        llm.engine.executor.close()
        link.close()


@pytest.fixture
def node(secret: Path) -> Iterator[subprocess.Popen[bytes]]:
    with node_process(secret, **TWO) as process:
        yield process


@pytest.mark.slow
def test_streams_go_on_when_a_machines_stage_ends_and_it_joins_again(
    node: subprocess.Popen[bytes], secret: Path, expected: Any
) -> None:
    args = EngineArgs(**TWO, master_secret_file=str(secret))
    before, door_module.LIMIT_S = door_module.LIMIT_S, 180.0
    door = Door(make=lambda: AsyncLLM.from_args(args, hang_timeout_s=12.0))
    try:
        engine, stages = door.llm.engine_pid, children_of(node.pid)
        os.kill(stages[0], 9)
        got = door.run(door.all_outputs(REQUESTS))
        assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
        door.run(restarted(door, engine))
        assert children_of(node.pid) != stages
        assert engine is not None
        wait_until_gone([engine, *stages])
    finally:
        door.close()
        door_module.LIMIT_S = before
