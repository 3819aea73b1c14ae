"""Where the engines of `data_parallel_size` run: in processes of this machine, or as actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.common.errors import ConfigError
from quire.config.args import EngineArgs
from quire.config.machine import parse_bytes
from quire.config.parallel import ANY_CPU
from quire.engine.routing.replicas import replica_args
from quire.interfaces.launch.link import Launcher, ProcessLink
from quire.interfaces.launch.ray_cluster import RayCluster


@dataclass(frozen=True, slots=True)
class Placed:
    """Engines that have a place to run."""

    engines: Sequence[tuple[EngineArgs, Launcher]]
    """The arguments of each, and what starts its process, each time that one is needed."""
    close: Callable[[], None] = lambda: None
    """Gives the places back when the engines have ended; it blocks."""


def place(args: EngineArgs) -> Placed:
    """Find a place for each engine. Raises ConfigError if there are more engines than CPUs."""
    return BACKENDS[args.distributed_executor_backend or "mp"](args)


def _on_this_machine(args: EngineArgs) -> Placed:
    return Placed([(part, ProcessLink.launch) for part in replica_args(args)])


def _on_ray(args: EngineArgs) -> Placed:
    """Each stage of an engine gets as many CPUs of a node as its ranks have threads, and of the node's memory an equal
    share with the engines and stages beside it."""
    if args.cpu_list not in (None, ANY_CPU):
        raise ConfigError(f"cpu_list={args.cpu_list!r}: Ray chooses the nodes and CPUs of engines; give num_threads")
    limit = None
    if args.memory_limit is not None:
        num_parts = args.data_parallel_size * args.pipeline_parallel_size
        limit = parse_bytes("memory_limit", args.memory_limit) // num_parts
    cluster = RayCluster.place(args)
    part = replace(
        args,
        model=_absolute(args.model),
        tokenizer=_absolute(args.tokenizer),
        download_dir=_absolute(args.download_dir),
        speculative_config=_drafting(args),
        data_parallel_size=1,
        distributed_executor_backend=None,
        ray_address=None,
        num_threads=cluster.num_threads,
        cpu_list=ANY_CPU,  # what else runs on its node is unknown
        memory_limit=limit,
    )
    shares = [args.gpu_memory_utilization / beside for beside in cluster.parts_beside()]
    parts = [replace(part, gpu_memory_utilization=share) for share in shares]
    return Placed([(each, partial(cluster.launch, n, each)) for n, each in enumerate(parts)], cluster.close)


def _absolute(name: str | None) -> str | None:
    """Return the absolute path of a file or folder that exists; other names, such as ids of the hub, as they are."""
    return name if name is None or not Path(name).exists() else str(Path(name).absolute())


def _drafting(args: EngineArgs) -> Mapping[str, Any] | None:
    """`speculative_config`, with the draft model's path as an absolute one."""
    given = args.speculative_config
    return given if given is None or "model" not in given else {**given, "model": _absolute(given["model"])}


BACKENDS: Mapping[str, Callable[[EngineArgs], Placed]] = {
    "mp": _on_this_machine,
    "uni": _on_this_machine,
    "ray": _on_ray,
}
"""By `distributed_executor_backend`. vLLM's `uni` is the same as `mp`."""
