"""A machine besides the one that serves: it joins, runs its stage, and joins again when the engine has ended."""

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from quire.common.errors import ConfigError, OutOfMemoryError
from quire.common.log import logger, show_messages
from quire.config.args import EngineArgs, EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.config.machine import format_bytes, machine_memory
from quire.config.parallel import Shard
from quire.runner.parallel.links import start_child
from quire.runner.parallel.pipeline.nodes import fingerprint, join


class Own(msgspec.Struct):
    """What a machine decides by itself."""

    node_rank: int
    path: str
    """Where the model is."""
    num_threads: int | None
    cpus: tuple[int, ...]
    memory_limit_bytes: int | None


def run_node(args: EngineArgs) -> NoReturn:
    """Run this machine's stage, for one engine after another. Raises ConfigError if there is no machine 0, or it
    refuses this one."""
    config = args.resolve()
    nodes = config.parallel.nodes
    if nodes is None or nodes.node_rank == 0:
        raise ConfigError("node_rank=0 serves requests; a machine that only computes a stage has node_rank 1 or more")
    show_messages()
    parallel = config.parallel
    own = Own(
        nodes.node_rank,
        str(config.model.path.absolute()),
        parallel.num_threads,
        parallel.cpus,
        config.cache.memory_limit_bytes,
    )
    content = fingerprint(config.model)
    while True:
        logger.info("machine %d of %d joins %s", nodes.node_rank, nodes.nnodes, nodes.master_addr)
        with join(nodes, content) as sock:
            given = [str(sock.fileno()), msgspec.json.encode(own).decode()]
            process = start_child("quire.runner.parallel.pipeline.stage_process", given, [sock.fileno()])
        logger.info("machine %d has joined", nodes.node_rank)
        logger.info("the stage has ended with status %d", process.wait())


def on_this_machine(config: EngineConfig, kv_cache: KVCacheConfig, own: Own) -> EngineConfig:
    """The config of a stage that another machine has planned, as this one runs it. Raises OutOfMemoryError if the stage
    does not fit."""
    config = replace(
        config,
        model=replace(config.model, path=Path(own.path)),
        parallel=replace(config.parallel, num_threads=own.num_threads, cpus=own.cpus),
        cache=replace(config.cache, memory_limit_bytes=own.memory_limit_bytes),
    )
    needed, machine = _needed_bytes(config, kv_cache), machine_memory().limited(own.memory_limit_bytes)
    first, end = config.model.layers or (0, 0)
    if needed > machine.limit_bytes:
        raise OutOfMemoryError(
            f"machine {own.node_rank}: its stage of the layers {first} to {end - 1} needs {format_bytes(needed)} with "
            f"a KV cache of {format_bytes(kv_cache.total_bytes)}, and this machine has "
            f"{format_bytes(machine.limit_bytes)}: lower kv_cache_memory or max_num_batched_tokens, or take more "
            "machines"
        )
    return config


def _needed_bytes(config: EngineConfig, kv_cache: KVCacheConfig) -> int:
    """Of all ranks of the stage."""
    from quire import kernels
    from quire.models.activations import activation_bytes
    from quire.models.adapters.slots import adapter_reserve
    from quire.models.weights.usage import weight_use

    num_ranks, lora = config.parallel.tensor_parallel_size, config.lora
    ranks = None if num_ranks == 1 else kernels.Ranks(Shard(0, num_ranks))
    of_rank = weight_use(config.model, ranks).num_bytes
    of_rank += activation_bytes(config.model, config.scheduler.max_num_batched_tokens, lora, ranks)
    of_rank += 0 if lora is None else adapter_reserve(config.model, lora, ranks)
    return of_rank * num_ranks + kv_cache.total_bytes + kv_cache.host_bytes
