"""Engines of several ranks and stages on a Ray cluster: where they are placed, and what happens when a part dies."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from quire import LLM, ConfigError
from tests.async_llm.door import Door
from tests.parallel.test_faults import is_gone

from .conftest import parent_of, processes, until
from .test_engines import WANTED, alone, check, interrupted, node_of, on, step

__all__ = ["alone"]
NUM_CPUS = 2
"""Of each of the two nodes."""
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "ranks": (2, {"tensor_parallel_size": 2}),
    "stages": (2, {"pipeline_parallel_size": 2}),
    "ranks of stages": (1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}


@pytest.fixture(scope="module", params=list(KINDS))
def door(cluster: Any, request: pytest.FixtureRequest) -> Iterator[Door]:
    """Engines that use all CPUs of the cluster, and of which nothing is left afterwards."""
    from ray.util.placement_group import placement_group_table

    number, given = KINDS[request.param]
    door = Door(**on(cluster, number, **given))
    try:
        yield door
    finally:
        door.close()
    until(lambda: not computing(), "processes of engines are left behind")
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}


def computing() -> list[int]:
    """The processes of engines, stages and ranks."""
    return [pid for pid, command in processes().items() if " -m quire." in command and not is_gone(pid)]


def parts_of(pid: int) -> list[int]:
    """A process, and those that it has started, and so on."""
    found = [pid]
    for child in computing():
        with suppress(OSError):
            found += parts_of(child) if parent_of(child) == pid else []
    return found


def machines(door: Door, number: int) -> list[int]:
    """The processes that the actors of an engine have started, that of the engine first."""
    link: Any = door.llm.group.engines[number]._client._link
    return [link.pid, *[stage.pid for stage in getattr(link, "_stages", [])]]


def nodes_of(door: Door, number: int) -> list[str]:
    return [node_of(parent_of(pid)) for pid in machines(door, number)]


def test_ranks_share_a_node_stages_do_not_and_the_tokens_are_those_of_one_process(door: Door, alone: list[Any]) -> None:
    check(door.run(door.all_outputs(WANTED)), alone)
    engines = range(len(door.llm.group.engines))
    parts = [parts_of(pid) for number in engines for pid in machines(door, number)]
    nodes = [nodes_of(door, number) for number in engines]
    assert {len(each) for each in nodes} == {len(set(each)) for each in nodes}, "each stage is on a node of its own"
    assert len({node for each in nodes for node in each}) == 2
    for pid in [pid for each in parts for pid in each]:
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0), "it is pinned to CPUs that others have too"


@pytest.mark.parametrize(
    ("door", "what"),
    [("ranks", "actor"), ("ranks", "process"), ("stages", "actor"), ("ranks of stages", "process")],
    indirect=["door"],
)
def test_streams_go_on_when_a_part_of_an_engine_is_killed(door: Door, what: str, alone: list[Any]) -> None:
    """The last part: a rank of the engine, or of its other stage."""
    number = len(door.llm.group.engines) - 1
    engine, its = door.llm.group.engines[number], machines(door, number)
    before = [*[part for pid in its for part in parts_of(pid)], *map(parent_of, its)]

    async def kill() -> None:
        os.kill(parent_of(its[-1]) if what == "actor" else parts_of(its[-1])[-1], signal.SIGKILL)
        while engine.death is None:
            await asyncio.sleep(0.01)

    moved = door.llm.num_replayed
    door.record.events.clear()
    check(interrupted(door, kill), alone)
    assert door.llm.num_replayed > moved
    until(lambda: door.run(step(door)), "the engine is not replaced")
    until(lambda: all(map(is_gone, before)), "a part of the engine that ended is left behind")
    assert len(computing()) == len(
        [part for n in range(number + 1) for pid in machines(door, n) for part in parts_of(pid)]
    )


@pytest.mark.parametrize("door", ["stages"], indirect=True)
def test_streams_go_on_when_the_node_of_a_stage_leaves_and_another_joins(
    door: Door, alone: list[Any], cluster: Any
) -> None:
    """Each engine has a part there."""
    its = nodes_of(door, 0)[-1]
    (node,) = [node for node in cluster.worker_nodes if node.node_id == its]

    async def leave() -> None:
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        while not all(engine.death for engine in door.llm.group.engines):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(cluster.add_node, num_cpus=NUM_CPUS)

    door.record.events.clear()
    check(interrupted(door, leave), alone)
    until(lambda: door.run(step(door)), "the engines are not replaced")
    assert {len(set(nodes_of(door, number))) for number in range(2)} == {2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 4}, r"=1 engines of 4 ranks of 1 threads need 4 CPUs, each 4 on one node, .* 2 "),
        ({"pipeline_parallel_size": 5}, r"=1 engines of 5 stages of 1 threads need 5 CPUs, and the nodes of the Ray"),
    ],
)
def test_more_than_the_nodes_have_is_refused(cluster: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**on(cluster, 1, **given))
