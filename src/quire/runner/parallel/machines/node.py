"""A machine besides the one that serves: it joins, runs its part, and joins again when the engine has ended."""

import select
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from quire.common.errors import ConfigError, OutOfMemoryError
from quire.common.liveness import end_of, start_child
from quire.common.log import logger, show_messages
from quire.config.args import EngineArgs, EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.config.machine import format_bytes, machine_memory
from quire.config.model import ModelConfig
from quire.config.parallel import NodesConfig
from quire.runner.parallel.links import EXIT_S
from quire.runner.parallel.machines.nodes import fingerprint, join

_TICK_MS = 100


class Own(msgspec.Struct):
    """What a machine decides by itself."""

    node_rank: int
    path: str
    """Where the model is."""
    num_threads: int | None
    cpus: tuple[int, ...]
    memory_limit_bytes: int | None
    num_machines: int = 1
    """Among which the ranks of a stage are divided."""
    pins_ranks: bool = True
    """As ParallelConfig has it."""
    draft_path: str | None = None
    """Where the draft model is, if this machine's arguments name it."""

    @classmethod
    def of(cls, config: EngineConfig, nodes: NodesConfig) -> "Own":
        """What the arguments of this machine say."""
        parallel, draft = config.parallel, config.draft
        return cls(
            nodes.node_rank,
            str(config.model.path.absolute()),
            parallel.num_threads,
            parallel.cpus,
            config.cache.memory_limit_bytes,
            parallel.num_machines,
            parallel.pins_ranks,
            None if draft is None else str(draft.path.absolute()),
        )

    def draft_of(self, config: EngineConfig) -> ModelConfig | None:
        """The engine's draft model, as this machine has it: in the model's folder, where the arguments name it, or at
        machine 0's path."""
        draft = config.draft
        if draft is None:
            return None
        is_in_model = draft.path == config.model.path
        path = self.path if is_in_model else self.draft_path
        return draft if path is None else replace(draft, path=Path(path))


def run_node(args: EngineArgs) -> NoReturn:
    """Run this machine's part, for one engine after another. Raises ConfigError if there is no machine 0, or it refuses
    this one."""
    run = part_of(args)
    while True:
        run()


def part_of(args: EngineArgs) -> Callable[[], None]:
    """Return what joins machine 0, and runs this machine's part until the engine ends. Raises ConfigError, as the call
    does if there is no machine 0, or it refuses this one."""
    config = args.resolve()
    nodes = config.parallel.nodes
    if nodes is None or nodes.node_rank == 0:
        raise ConfigError("node_rank=0 serves requests; a machine that only computes has node_rank 1 or more")
    show_messages()
    own = Own.of(config, nodes)
    module = "pipeline.stage_process" if nodes.num_ranks is None else "machines.machine_process"
    content, has_joined = fingerprint(config.model), False

    def run() -> None:
        nonlocal has_joined
        logger.info("machine %d of %d joins %s", nodes.node_rank, nodes.nnodes, nodes.master_addr)
        with ExitStack() as stack:
            numbers = range(nodes.num_connections)
            sockets = [stack.enter_context(join(nodes, content, number, is_again=has_joined)) for number in numbers]
            has_joined = True
            logger.info("machine %d has joined", nodes.node_rank)
            descriptors = [sock.fileno() for sock in sockets]
            given = [*map(str, descriptors), msgspec.json.encode(own).decode()]
            process = start_child(f"quire.runner.parallel.{module}", given, descriptors)
            _await_end(process, sockets[0])
        logger.info("the process that computes for machine 0 %s", end_of(process, EXIT_S))

    return run


def _await_end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    """Wait until a process or its connection ends: one that hangs does not notice that."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    while process.poll() is None and not poller.poll(_TICK_MS):
        pass


def on_this_machine(config: EngineConfig, kv_cache: KVCacheConfig, own: Own) -> EngineConfig:
    """The config of a part that machine 0 has planned, as this one runs it. Raises OutOfMemoryError if it does not
    fit."""
    config = replace(
        config,
        model=replace(config.model, path=Path(own.path)),
        draft=own.draft_of(config),
        parallel=replace(config.parallel, num_threads=own.num_threads, cpus=own.cpus, pins_ranks=own.pins_ranks),
        cache=replace(config.cache, memory_limit_bytes=own.memory_limit_bytes),
    )
    num_ranks = config.parallel.tensor_parallel_size // own.num_machines
    needed, machine = _needed_bytes(config, kv_cache, num_ranks), machine_memory().limited(own.memory_limit_bytes)
    first, end = config.model.layers or (0, 0)
    part = f"stage of the layers {first} to {end - 1}" if end else f"part of {num_ranks} rank(s)"
    if needed > machine.limit_bytes:
        raise OutOfMemoryError(
            f"its {part} needs {format_bytes(needed)} with a KV cache of "
            f"{format_bytes(kv_cache.total_bytes)}, and this machine has "
            f"{format_bytes(machine.limit_bytes)}: lower kv_cache_memory or max_num_batched_tokens, or take more "
            "machines"
        )
    return config


def _needed_bytes(config: EngineConfig, kv_cache: KVCacheConfig, num_own: int) -> int:
    """Of all ranks on this machine."""
    from quire import kernels
    from quire.models.activations import activation_bytes
    from quire.models.adapters.slots import adapter_reserve
    from quire.models.weights.usage import weight_use

    num_ranks, lora = config.parallel.tensor_parallel_size, config.lora
    ranks = None if num_ranks == 1 else kernels.Ranks(config.parallel.shard(0))
    of_rank = weight_use(config.model, ranks).num_bytes
    of_rank += activation_bytes(config.model, config.scheduler.max_num_batched_tokens, lora, ranks)
    of_rank += 0 if lora is None else adapter_reserve(config.model, lora, ranks)
    of_rank += 0 if config.draft is None else weight_use(config.draft, ranks).num_bytes
    return of_rank * num_own + kv_cache.total_bytes + kv_cache.host_bytes
