"""Engines that are actors of Ray: they answer as local ones do, and requests move when an actor or its node dies."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire import ConfigError, EngineArgs, SamplingParams
from quire.interfaces.launch import ray_cluster
from tests.async_llm.door import Door
from tests.async_llm.test_recovery import KINDS
from tests.async_llm.wanted import told, whole

from .conftest import parent_of, until

ARGS: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_num_seqs": 16, "num_threads": 1}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind="delta")
WANTED = [*KINDS.values(), *KINDS.values(), ("b", LONG), ("c", LONG)]


def on(cluster: Any, number: int = 2, **kwargs: Any) -> dict[str, Any]:
    where = {"distributed_executor_backend": "ray", "ray_address": cluster.address}
    return {**ARGS, **where, "data_parallel_size": number, **kwargs}


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What a single engine of this machine answers."""
    door = Door(**ARGS)
    try:
        return door.run(door.all_outputs(WANTED))
    finally:
        door.close()


@pytest.fixture(scope="module")
def shared(cluster: Any) -> Iterator[Door]:
    door = Door(**on(cluster))
    yield door
    door.close()


@pytest.fixture
def door(shared: Door) -> Iterator[Door]:
    shared.record.events.clear()
    yield shared
    until(lambda: shared.run(step(shared)), "an engine does not start again")
    shared.run(shared.drained())


async def step(door: Door) -> bool:
    await asyncio.sleep(0.01)
    return all(engine.death is None for engine in door.llm.group.engines)


def check(got: list[Any], alone: list[Any]) -> None:
    for (_, params), one, other in zip(WANTED, alone, got, strict=True):
        kind = getattr(params, "output_kind", "final_only")
        assert told(whole(other, kind)) == told(whole(one, kind))


def interrupted(door: Door, interrupt: Any) -> list[Any]:
    """The outputs of all requests, where this is called amid them."""

    async def main() -> list[Any]:
        reading = asyncio.create_task(door.all_outputs(WANTED))
        await door.record.until(lambda: len(door.record.of("tokens")) >= 2 * len(WANTED))
        await interrupt()
        return await reading

    return list(door.run(main()))


def test_actors_give_the_tokens_of_one_engine_each_on_a_node_of_its_own(door: Door, alone: list[Any]) -> None:
    check(door.run(door.all_outputs(WANTED)), alone)
    assert len({node_of(parent_of(pid)) for pid in door.llm.group.pids if pid is not None}) == 2


def node_of(actor_pid: int) -> str:
    """The node on which an actor runs."""
    import ray

    (node,) = [
        actor["Address"]["NodeID"] for actor in ray._private.state.actors().values() if actor["Pid"] == actor_pid
    ]
    return str(node)


@pytest.mark.parametrize("what", ["actor", "engine"])
def test_streams_of_one_that_is_killed_continue_in_the_other_with_the_same_tokens(
    door: Door, alone: list[Any], what: str
) -> None:
    engine = door.llm.group.engines[1]
    pid = engine.pid
    assert pid is not None

    async def kill() -> None:
        os.kill(parent_of(pid) if what == "actor" else pid, signal.SIGKILL)
        while engine.death is None:
            await asyncio.sleep(0.01)

    before = door.llm.num_replayed
    check(interrupted(door, kill), alone)
    assert door.llm.num_replayed > before
    until(lambda: door.run(step(door)), "the actor is not replaced")
    assert engine.pid != pid
    assert not os.path.exists(f"/proc/{pid}"), "the process of a dead actor ends"


def test_a_stopped_engine_is_noticed_and_its_actor_replaced(door: Door, alone: list[Any]) -> None:
    engine = door.llm.group.engines[0]
    pid = engine.pid
    assert pid is not None

    async def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        while "was silent for" not in str(engine.death):
            await asyncio.sleep(0.01)

    check(interrupted(door, stop), alone)


def test_a_node_that_leaves_and_one_that_joins(door: Door, alone: list[Any], cluster: Any) -> None:
    engine = door.llm.group.engines[1]
    assert engine.pid is not None
    its = node_of(parent_of(engine.pid))
    (node,) = [node for node in cluster.worker_nodes if node.node_id == its]

    async def leave() -> None:
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        while engine.death is None:
            await asyncio.sleep(0.01)

    check(interrupted(door, leave), alone)
    assert [running.death is None for running in door.llm.group.engines] == [True, False]
    cluster.add_node(num_cpus=1)
    until(lambda: door.run(step(door)), "no engine starts on the node that joined")
    check(door.run(door.all_outputs(WANTED)), alone)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": 3}, r"data_parallel_size=3 engines of 1 threads need 3 CPUs, and the nodes of the Ray"),
        ({"num_threads": 4}, r"2 engines of 4 threads need 8 CPUs, and the nodes of the Ray cluster have .*1"),
        ({"cpu_list": "0", "num_threads": None}, "cpu_list='0': Ray chooses the nodes"),
    ],
)
def test_more_than_the_cluster_has_is_refused(shared: Door, cluster: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Door(**on(cluster, **given))


def test_cpus_that_others_use_are_named(shared: Door, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "PLACE_S", 0.5)
    with pytest.raises(ConfigError, match=r"had no 2 x 1 free CPUs within 0\.5 s: 0 of 2 are free"):
        Door(**on(cluster))


def test_a_cluster_of_this_machine_listens_on_the_loopback_address_and_leaves_nothing() -> None:
    program = (
        "from pathlib import Path\n"
        "from quire import LLM, SamplingParams\n"
        "where = {'distributed_executor_backend': 'ray', 'tensor_parallel_size': 2}\n"
        "llm = LLM(**where, num_threads=1, num_gpu_blocks_override=64)\n"
        "print(llm.generate('a', SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids)\n"
        "import os, subprocess\n"
        "mine = os.environ['RAY_AUTH_TOKEN'].encode()\n"
        "inodes = set()\n"
        "for each in Path('/proc').glob('[0-9]*'):\n"
        "    try:\n"
        "        if mine in (each / 'environ').read_bytes() or each.name == str(os.getpid()):\n"
        "            inodes |= {os.readlink(fd) for fd in (each / 'fd').iterdir()}\n"
        "    except OSError:\n"
        "        pass\n"
        "for table in ('tcp', 'tcp6'):\n"
        "    for line in Path('/proc/net/' + table).read_text().splitlines()[1:]:\n"
        "        fields = line.split()\n"
        "        if fields[3] == '0A' and f'socket:[{fields[9]}]' in inodes:\n"
        "            print('listens on', fields[1])\n"
        "llm._engine.close()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ray_cluster.LOCAL}
    environment |= {"RAY_AUTH_TOKEN": "only-this-test" * 4, "RAY_ADDRESS": ""}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    addresses = {line.split()[-1].partition(":")[0] for line in result.stdout.splitlines() if "listens on" in line}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert addresses, "the sockets were found"
    assert addresses <= loopback


def test_an_engine_that_cannot_start_says_why(shared: Door, cluster: Any) -> None:
    """The error of the engine's process comes from its node."""
    with pytest.raises(ConfigError, match="data_parallel_size=2 engines"):
        Door(**on(cluster, num_threads=2))
    assert EngineArgs(**on(cluster)).resolve().parallel.backend == "ray"
