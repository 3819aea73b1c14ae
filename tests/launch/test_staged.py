"""Engines whose stages are placed by Ray, without Ray: how they start, that they end together, and their tokens."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import pytest

from quire import LLM, AsyncLLM, ConfigError, EngineArgs, SamplingParams
from quire.common.errors import EngineDeadError
from quire.engine.process import messages
from quire.interfaces.async_llm import starting
from quire.interfaces.launch.placing import Placed
from quire.interfaces.launch.ray_actor import EngineActor, RayLink
from quire.interfaces.launch.ray_cluster import RayCluster
from quire.interfaces.launch.staged import StagedLink
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.launch.test_ray_link import FakeActor, ray

__all__ = ["ray"]
ARGS = EngineArgs(pipeline_parallel_size=2, num_gpu_blocks_override=64, num_threads=1, cpu_list="any")
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)


class FakeLink:
    """A link to nothing."""

    def __init__(self, pid: int) -> None:
        self.pid, self.clock_s, self.own_args = pid, 0.5 * pid, dict[str, Any]()
        self.reader = asyncio.StreamReader()
        self.written = list[bytes]()
        self.calls = list[str]()

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def drain(self) -> None:
        self.calls.append("drain")

    def close(self) -> None:
        self.calls.append("close")
        self.reader.feed_eof()

    def kill(self) -> None:
        self.calls.append("kill")
        self.close()

    async def end(self) -> str:
        self.close()
        return f"process {self.pid} ended"


def staged(run: Callable[[StagedLink, list[FakeLink]], Any]) -> None:
    """Run this with an engine of three stages."""

    async def main() -> None:
        links = [FakeLink(number) for number in range(3)]
        await run(StagedLink(links[0], links[1:], ARGS, "10.0.0.1:7"), links)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_stages_get_the_arguments_of_machines_and_the_engine_is_machine_0() -> None:
    async def run(link: StagedLink, links: list[FakeLink]) -> None:
        assert (link.pid, link.clock_s, link.reader) == (0, 0.0, links[0].reader)
        assert link.own_args == {"nnodes": 3, "master_addr": "10.0.0.1:7"}
        assert links[0].written == []
        for number in (1, 2):
            (frame,) = links[number].written
            start = msgspec.msgpack.decode(frame[messages.LENGTH_BYTES :], type=messages.Start)
            args = EngineArgs(**start.args | {"lora_modules": ()})
            assert (args.nnodes, args.master_addr, args.node_rank) == (3, "10.0.0.1:7", number)
            assert args.num_gpu_blocks_override == 64
            assert start.is_other_machine
        link.write(b"x")
        await link.drain()
        assert (links[0].written, links[0].calls) == ([b"x"], ["drain"])
        link.kill()
        assert [each.calls[-2:] for each in links] == [["kill", "close"]] * 3

    staged(run)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "process 1 ended"),
        (messages.to_frame(messages.StartFailed("ConfigError", "no model\nhere")), "no model\nhere"),
        (messages.to_frame(messages.Heartbeat(1, False))[:-1], "process 1 ended"),
        (b"\4\0\0\0abcd", "process 1 ended"),
        (b"\xff" * 4, "process 1 ended"),
    ],
    ids=["nothing", "its error", "a part of a message", "nonsense", "a length that is too large"],
)
def test_an_engine_ends_with_each_of_its_stages(sent: bytes, reason: str) -> None:
    async def run(link: StagedLink, links: list[FakeLink]) -> None:
        for stage in links[1:]:
            stage.reader.feed_data(messages.to_frame(messages.Heartbeat(1, False)))
        links[1].reader.feed_data(sent)
        links[1].reader.feed_eof()
        assert await link.reader.read() == b""
        assert await link.end() == f"process 0 ended; stage 0: {reason}; stage 1: process 2 ended"

    staged(run)


# Engines, on a cluster of actors as Ray would call them


class Remote:
    """As what `ray.remote` returns."""

    def __init__(self, kind: type) -> None:
        assert kind is EngineActor

    def options(self, num_cpus: int, **options: Any) -> "Remote":
        assert num_cpus == 3
        return self

    def remote(self) -> FakeActor:
        return FakeActor()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, ray: None) -> RayCluster:
    """A cluster with an engine of two stages, each of as many threads as are reserved."""
    module, util = sys.modules["ray"], ModuleType("ray.util")
    strategies = ModuleType("ray.util.scheduling_strategies")
    util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: None  # type: ignore[attr-defined]
    module.util, module.remote = util, Remote  # type: ignore[attr-defined]
    for each in (util, strategies):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    FakeActor.made.clear()
    return RayCluster(None, ARGS, 3, owns_connection=False)


def started(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, of_stages: EngineArgs = ARGS) -> Any:
    """An engine, to whose stages these arguments are given."""
    placed = Placed([(ARGS, lambda: cluster.launch(0, of_stages))])
    monkeypatch.setattr(starting, "place", lambda args: placed)
    return AsyncLLM.from_args(ARGS)


@needs_native
@pytest.mark.parametrize("whose", [pytest.param(0, marks=pytest.mark.slow, id="engine"), pytest.param(1, id="stage")])
def test_an_engine_of_stages_gives_the_tokens_of_one_process_and_is_replaced_as_a_whole(
    whose: int, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> list[Any]:
        llm = await started(cluster, monkeypatch)
        try:
            first = [output async for output in llm.generate("def f(", PARAMS, "1")][-1]
            os.kill(FakeActor.made[whose].actor._link.pid, signal.SIGKILL)
            while not llm.num_restarts:
                await asyncio.sleep(0.01)
            return [first, [output async for output in llm.generate("def f(", PARAMS, "2")][-1]]
        finally:
            await llm.shutdown()

    expected = LLM(num_gpu_blocks_override=64, num_threads=1).generate("def f(", PARAMS, use_tqdm=False)[0].outputs
    assert [output.outputs for output in asyncio.run(asyncio.wait_for(main(), 120))] == [expected] * 2
    assert [actor.is_killed.is_set() for actor in FakeActor.made] == [True] * 4
    assert all(actor.actor._link._process.returncode is not None for actor in FakeActor.made)


@needs_native
def test_an_engine_of_stages_sleeps_and_wakes_up(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any:
        llm = await started(cluster, monkeypatch)
        try:
            await llm.sleep()
            stage = FakeActor.made[1].actor._link.pid
            while children_of(stage):  # what has computed there; it ends when the engine sleeps
                await asyncio.sleep(0.01)
            await llm.wake_up()
            assert llm.num_restarts == 0
            return [output async for output in llm.generate("def f(", PARAMS, "1")][-1]
        finally:
            await llm.shutdown()

    expected = LLM(num_gpu_blocks_override=64, num_threads=1).generate("def f(", PARAMS, use_tqdm=False)[0].outputs
    assert asyncio.run(asyncio.wait_for(main(), 120)).outputs == expected


@needs_native
def test_why_a_stage_cannot_run_is_why_the_engine_did_not_start(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineDeadError, match=r"the engine did not start: .*; stage 0: .*/nonexistent") as failed:
        asyncio.run(asyncio.wait_for(started(cluster, monkeypatch, replace(ARGS, model="/nonexistent")), 120))
    assert "\n" not in str(failed.value)
    assert [actor.is_killed.is_set() for actor in FakeActor.made] == [True] * 2


def test_a_part_that_cannot_be_placed_ends_the_others(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refuses = RayLink.start, [True, False]

    async def refuse(actor: Any, secret: bytes) -> RayLink:
        assert len(secret) == 32
        if refuses.pop():
            await actor.start.remote(secret)
            raise ConfigError("another version")
        return await start(actor, secret)

    monkeypatch.setattr(RayLink, "start", refuse)
    with pytest.raises(ConfigError, match="another version"):
        asyncio.run(asyncio.wait_for(cluster.launch(0, ARGS), 60))
    assert [actor.is_killed.is_set() for actor in FakeActor.made] == [True] * 2
