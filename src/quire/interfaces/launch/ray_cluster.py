"""RayCluster: places engines on the nodes of a Ray cluster, or on one that is started for this process alone."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

from quire.common.errors import ConfigError, EngineDeadError
from quire.common.log import logger
from quire.config.args import EngineArgs
from quire.interfaces.launch.link import EngineLink
from quire.interfaces.launch.ray_actor import EngineActor, RayLink, reason
from quire.interfaces.launch.staged import StagedLink

PLACE_S = 60.0
"""How long an engine waits for a node with free CPUs."""
_CONNECT_S = 5.0
LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for listening on the loopback address alone, on any system
    "RAY_AUTH_MODE": "token",
}
"""Settings of a cluster of this machine: nothing is reported, and other users of the machine cannot run code on it."""

MISSING = "distributed_executor_backend='ray' needs Ray, which is not installed: pip install 'quire[ray]'"

_lock = threading.Lock()
_num_users = 0
"""Clusters in use that this module has connected to; the last one disconnects."""


class RayCluster:
    """A placement group with a bundle for each stage of each engine, spread over the nodes: the CPUs of the stage's
    ranks, which so are on one node. If a node dies, Ray moves its bundles to another one, or to the next one that
    joins."""

    def __init__(self, group: Any, args: EngineArgs, num_threads: int, *, owns_connection: bool) -> None:
        """Use `place` instead."""
        self.num_threads = num_threads
        """Of each rank."""
        self._group = group
        self._owns_connection = owns_connection
        self._num_engines, self._num_stages = args.data_parallel_size, args.pipeline_parallel_size
        self._num_cpus = num_threads * args.tensor_parallel_size

    @classmethod
    def place(cls, args: EngineArgs) -> RayCluster:
        """Connect, and reserve CPUs for the engines; this takes seconds. Raises ConfigError."""
        owns = _connect(args.ray_address)
        try:
            return cls._reserve(args, owns)
        except BaseException:
            _disconnect(owns)
            raise

    @classmethod
    def _reserve(cls, args: EngineArgs, owns: bool) -> RayCluster:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        num_bundles = args.data_parallel_size * args.pipeline_parallel_size
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        num_threads = share_of_nodes(nodes, args)
        num_cpus = num_threads * args.tensor_parallel_size
        group = placement_group([{"CPU": num_cpus}] * num_bundles, strategy="SPREAD")
        if not group.wait(PLACE_S):
            remove_placement_group(group)
            raise ConfigError(
                f"the Ray cluster had no {num_bundles} x {num_cpus} free CPUs within {PLACE_S:g} s: "
                f"{ray.available_resources().get('CPU', 0):g} of {sum(nodes)} are free; end other work on the cluster, "
                f"or lower {_sizes(args)}"
            )
        return cls(group, args, num_threads, owns_connection=owns)

    def parts_beside(self) -> list[int]:
        """By engine, the number of stages, also of other engines, on the node of its own that has most of them."""
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        counts = Counter(nodes.values())
        return [max(counts[nodes[bundle]] for bundle in self._bundles(number)) for number in range(self._num_engines)]

    def _bundles(self, number: int) -> range:
        """Those of an engine. The first one is that of its process, which has the last stage."""
        return range(number * self._num_stages, (number + 1) * self._num_stages)

    async def launch(self, number: int, args: EngineArgs) -> EngineLink:
        """Start an actor with its CPUs for each stage of this engine, whose arguments are given. Raises EngineDeadError
        if one cannot be started, and ConfigError if its node has another version of Quire."""
        secret = secrets.token_bytes(32) if self._num_stages > 1 else b""
        engine, *stages = await all_or_none([self._start(bundle, secret) for bundle in self._bundles(number)])
        return StagedLink(engine, stages, args, engine.address) if stages else engine

    async def _start(self, bundle: int, secret: bytes) -> RayLink:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._num_cpus, "scheduling_strategy": place, "max_restarts": 0, "max_task_retries": 0}
        actor = ray.remote(EngineActor).options(**options).remote()
        try:
            async with asyncio.timeout(PLACE_S):
                return await RayLink.start(actor, secret)
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                problem = f"no node of the Ray cluster had {self._num_cpus} free CPUs for it within {PLACE_S:g} s"
                raise EngineDeadError(problem) from error
            if isinstance(error, RayError):
                raise EngineDeadError(f"the Ray cluster could not start it: {reason(error)}") from error
            raise

    def close(self) -> None:
        """Give the CPUs back; the engines have ended."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self._group)
        _disconnect(self._owns_connection)


async def all_or_none(starting: Sequence[Awaitable[RayLink]]) -> list[RayLink]:
    """Wait for all links, and kill the others if one cannot be started. Raises its error."""
    tasks = [asyncio.ensure_future(each) for each in starting]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for started in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(started, RayLink):
                started.kill()
        raise


def share_of_nodes(nodes: Sequence[int], args: EngineArgs) -> int:
    """Return the threads of each rank: `num_threads`, or the largest equal number with which all stages of all engines
    find a node that has the CPUs for their ranks.

    `nodes` are the CPUs of each node. Raises ConfigError if they do not fit.
    """
    num_ranks, num_stages = args.tensor_parallel_size, args.data_parallel_size * args.pipeline_parallel_size

    def fits(num_threads: int) -> bool:
        return sum(node // (num_threads * num_ranks) for node in nodes) >= num_stages

    if args.num_threads is not None and not fits(args.num_threads):
        raise _too_few(nodes, args, args.num_threads)
    best = args.num_threads or next((number for number in range(max(nodes, default=0), 0, -1) if fits(number)), 0)
    if best == 0:
        raise _too_few(nodes, args, 1)
    return best


def _too_few(nodes: Sequence[int], args: EngineArgs, num_threads: int) -> ConfigError:
    num_ranks, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    parts = f" of {num_stages} stages" * (num_stages > 1) + f" of {num_ranks} ranks" * (num_ranks > 1)
    together = f", each {num_ranks * num_threads} on one node" * (num_ranks > 1)
    return ConfigError(
        f"data_parallel_size={args.data_parallel_size} engines{parts} of {num_threads} threads need "
        f"{args.data_parallel_size * num_stages * num_ranks * num_threads} CPUs{together}, and the nodes of the Ray "
        f"cluster have {' + '.join(map(str, nodes)) or 'none'}: add nodes, or lower {_sizes(args)}"
    )


def _sizes(args: EngineArgs) -> str:
    """The arguments that say how many CPUs are needed."""
    names = ["data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"]
    wide = [name for name in names[1:] if getattr(args, name) > 1]
    return ", ".join([names[0], *wide]) + " or num_threads"


def _connect(address: str | None) -> bool:
    """Connect this process to a cluster, unless it is connected. Returns whether `_disconnect` must undo it, which it
    need not if others had connected it. Raises ConfigError."""
    global _num_users
    with _lock:
        if _num_users == 0:
            if "ray" in sys.modules and sys.modules["ray"].is_initialized():
                return False
            _init(address or os.environ.get("RAY_ADDRESS") or "local")
        _num_users += 1
        return True


def _init(address: str) -> None:
    """Raises ConfigError if Ray is not installed, and if there is no cluster at the address."""
    if address == "local":
        _set_up_for_this_machine()
    elif address != "auto":
        _check_answers(address)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})") from error
    try:
        ray.init(address, include_dashboard=False if address == "local" else None, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain exceptions too
        raise ConfigError(f"ray_address={address!r}: Ray cannot be used there: {reason(error)}") from error
    host = ray.util.get_node_ip_address()
    if address == "local" and not host.startswith("127."):
        ray.shutdown()
        raise ConfigError(
            f"a Ray cluster of this machine would listen on {host}: unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, or give "
            "ray_address"
        )
    logger.info("connected to a Ray cluster of %d nodes at %s", len(ray.nodes()), ray.get_runtime_context().gcs_address)


def _set_up_for_this_machine() -> None:
    """Set what Ray reads when it is imported. Raises ConfigError if it has been imported without."""
    if "ray" in sys.modules and not LOCAL.keys() <= os.environ.keys():
        raise ConfigError(
            "ray was imported before Quire could set it up for this machine alone: import it later, connect with "
            "ray.init() yourself, or give ray_address"
        )
    for name, value in {**LOCAL, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
        os.environ.setdefault(name, value)


def _check_answers(address: str) -> None:
    """Raise ConfigError unless something listens at the address: Ray itself would try for minutes."""
    if "://" in address:
        raise ConfigError(
            f"ray_address={address!r}: connections through a Ray client are not supported; start this program on a "
            "node of the cluster, and give HOST:PORT or auto"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"ray_address={address!r}: must be HOST:PORT, or auto for the cluster of this machine")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address={address!r} does not answer: {error}; start Ray there (`ray start --head`), or give none to "
            "start a cluster of this machine"
        ) from error


def _disconnect(owns: bool) -> None:
    global _num_users
    if not owns:
        return
    import ray

    with _lock:
        _num_users -= 1
        if _num_users == 0:
            ray.shutdown()
