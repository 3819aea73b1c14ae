"""How the engines of `data_parallel_size` share the CPUs and the memory of a machine."""

import dataclasses
import os

from quire.common.errors import ConfigError
from quire.config.args import EngineArgs
from quire.config.machine import cpu_quota, format_bytes, machine_memory, neighbours_first, parse_bytes
from quire.config.parallel import ANY_CPU, parse_cpu_list


def replica_args(args: EngineArgs) -> list[EngineArgs]:
    """Return the arguments of each engine: disjoint CPUs, neighbours first, and an equal part of the memory.

    `num_threads` and `kv_cache_memory` are each engine's, `cpu_list` and `memory_limit` all engines' together. Raises
    ConfigError if there are more engines than CPUs.
    """
    number = args.data_parallel_size
    if number == 1:
        return [args]
    memory_limit = _memory_limit(args) // number
    engines = [dataclasses.replace(args, data_parallel_size=1, memory_limit=memory_limit) for _ in range(number)]
    quota = cpu_quota()
    given = parse_cpu_list(ANY_CPU if args.cpu_list is None else args.cpu_list)
    cpus = neighbours_first(given or os.sched_getaffinity(0))
    most = len(cpus) if quota is None or given else min(len(cpus), max(1, int(quota)))
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    num_threads = num_ranks * (args.num_threads or most // (number * num_ranks))
    if num_threads * number > most or num_threads < 1:
        num_threads = max(num_threads, num_ranks)
        raise ConfigError(
            f"data_parallel_size={number} engines of {num_threads} threads need {number * num_threads} "
            f"CPUs, and {most} are available: lower data_parallel_size or num_threads"
        )
    parts = [cpus[start : start + num_threads] for start in range(0, number * num_threads, num_threads)]
    cannot_pin = quota is not None and quota < len(cpus)  # pinned threads would wait for CPUs that others use
    if cannot_pin or args.cpu_list == ANY_CPU:
        unpinned = None if given else args.cpu_list
        return [
            dataclasses.replace(engine, num_threads=num_threads // num_ranks, cpu_list=unpinned) for engine in engines
        ]
    return [
        dataclasses.replace(engine, num_threads=None, cpu_list=",".join(map(str, part)))
        for engine, part in zip(engines, parts, strict=True)
    ]


def check_one_engine(args: EngineArgs) -> None:
    """Raise ConfigError if the arguments are those of several engines, where one is wanted."""
    if args.data_parallel_size > 1:
        raise ConfigError(f"data_parallel_size={args.data_parallel_size}: this is one engine; use LLM or AsyncLLM")
    if args.has_own_processes:
        raise ConfigError("distributed_executor_backend='ray': this is an engine in this process; use LLM or AsyncLLM")


def _memory_limit(args: EngineArgs) -> int:
    """Bytes for all engines together. Raises ConfigError if it is too little to be shared."""
    if args.memory_limit is not None:
        limit = parse_bytes("memory_limit", args.memory_limit)
    else:
        limit = machine_memory().for_plans(args.gpu_memory_utilization, args.data_parallel_size)
    if limit < args.data_parallel_size:
        raise ConfigError(f"memory_limit={format_bytes(limit)}: too little for {args.data_parallel_size} engines")
    return limit
