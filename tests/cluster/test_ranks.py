"""Engines of several ranks and stages on a Ray cluster: where they are placed, and what happens when a part dies."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import pytest

from quire import LLM, ConfigError
from tests.async_llm.door import Door
from tests.parallel.ends import is_gone

from .conftest import parent_of, processes, until
from .test_engines import WANTED, alone, check, interrupted, node_of, on, step

__all__ = ["alone"]
NUM_CPUS = 2
"""Of each of the two nodes."""
RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}


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


def engines(door: Door) -> range:
    return range(len(door.llm.group.engines))


@pytest.mark.parametrize(
    ("number", "given", "ending"),
    [(2, RANKS, ["actor"]), (2, STAGES, ["actor", "node"]), (1, RANKS | STAGES, [])],
    ids=["ranks", "stages", "ranks of stages"],
)
def test_engines_of_several_processes_go_on_when_a_part_ends(
    number: int, given: dict[str, Any], ending: list[str], alone: list[Any], cluster: Any
) -> None:
    """They use all CPUs of the cluster. What ends is the actor or node of another stage where there is one."""
    from ray.util.placement_group import placement_group_table

    door = Door(**on(cluster, number, **given))
    try:
        check(door.run(door.all_outputs(WANTED)), alone)
        check_places(door)
        for what in ending:
            check_end(door, what, alone, cluster)
            check_places(door)
    finally:
        door.close()
    until(lambda: not computing(), "processes of engines are left behind")
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}


def check_places(door: Door) -> None:
    """Ranks of a stage, which are one actor's, share a node, and stages do not."""
    nodes = [[node_of(parent_of(pid)) for pid in machines(door, number)] for number in engines(door)]
    assert all(len(set(each)) == len(each) for each in nodes)
    assert len({node for each in nodes for node in each}) == 2
    for pid in computing():
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0), "it is pinned to CPUs that others have too"


def check_end(door: Door, what: str, alone: list[Any], cluster: Any) -> None:
    """All requests get their tokens, and a new engine is placed; nothing of the other is left."""
    number = engines(door)[-1]
    its = machines(door, number)
    before = [*[part for pid in its for part in parts_of(pid)], *map(parent_of, its)]
    ended = [door.llm.group.engines[each] for each in (engines(door) if what == "node" else [number])]

    async def end() -> None:
        if what == "node":  # on which each engine has a stage
            id_of = node_of(parent_of(its[-1]))
            (node,) = [node for node in cluster.worker_nodes if node.node_id == id_of]
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        else:
            os.kill(parent_of(its[-1]), signal.SIGKILL)
        while not all(engine.death for engine in ended):
            await asyncio.sleep(0.01)
        if what == "node":
            cluster.add_node(num_cpus=NUM_CPUS)

    moved = door.llm.num_replayed
    door.record.events.clear()
    check(interrupted(door, end), alone)
    assert door.llm.num_replayed > moved
    until(lambda: door.run(step(door)), "the engine is not replaced")
    until(lambda: all(map(is_gone, before)), "a part of the engine that ended is left behind")
    running = [pid for each in engines(door) for pid in machines(door, each)]
    assert len(computing()) == sum(len(parts_of(pid)) for pid in running)
    check(door.run(door.all_outputs(WANTED)), alone)


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
