"""What an engine of several ranks needs of the machine and the model, and which CPUs each rank gets."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from quire.common.errors import ConfigError
from quire.config.args import EngineConfig
from quire.config.machine import cpu_quota, neighbours_first
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig, Shard, shares
from quire.kernels.backends.native.ranks import native_backend
from quire.models.weights.usage import weight_use


def check_ranks(config: EngineConfig) -> None:
    """Raise ConfigError if several ranks are wanted for what only one process can do."""
    num_ranks, model = config.parallel.tensor_parallel_size, config.model
    if num_ranks == 1:
        return
    native_backend()
    check_divisible(model, f"tensor_parallel_size={num_ranks}")
    if config.parallel.enable_expert_parallel and not weight_use(config.model).expert_bytes:
        raise ConfigError(f"enable_expert_parallel=True: {config.model.architecture} has no experts; leave it out")
    if config.parallel.pipeline_parallel_size == 1 or config.parallel.nodes is not None:  # or else stages share CPUs
        rank_threads(replace(config.parallel, pipeline_parallel_size=1), Shard(0, config.parallel.own_ranks))


def check_divisible(model: ModelConfig, given: str) -> None:
    """Raise ConfigError for a model of which no process can have a part. `given` asks for several processes."""
    unsupported = {
        "models that pool texts (runner='pooling')": model.runner == "pooling",
        "modules of transformers (model_impl='transformers')": model.model_impl == "transformers",
        "weights that stay in a file (weights_from_file='always')": model.weights_from_file == "always",
    }
    for what, is_given in unsupported.items():
        if is_given:
            raise ConfigError(f"{given}: {what} run in one process each; leave it at 1")


def rank_threads(parallel: ParallelConfig, shard: Shard) -> ParallelConfig:
    """The threads of one rank: CPUs of its own, where there is one for each thread of all ranks and `pins_ranks` allows
    it. Raises ConfigError if there are fewer CPUs than ranks, unless `num_threads` says that ranks may share them."""
    cpus = parallel.cpus or tuple(neighbours_first(os.sched_getaffinity(0)))
    quota = None if parallel.cpus else cpu_quota(Path("/"))
    most = len(cpus) if quota is None else min(len(cpus), max(1, int(quota)))
    if parallel.num_threads is None and most < shard.num_ranks:
        stages = parallel.pipeline_parallel_size
        given = f"tensor_parallel_size={parallel.tensor_parallel_size}"
        if stages > 1:
            given += f" and pipeline_parallel_size={stages}, together {shard.num_ranks}"
        if shard.num_ranks < parallel.tensor_parallel_size:
            given += f", {shard.num_ranks} of them on this machine:"
        raise ConfigError(
            f"{given} ranks need a CPU each, and {most} are available: lower it, or let ranks share CPUs with "
            "num_threads=1"
        )
    counts = [parallel.num_threads] * shard.num_ranks if parallel.num_threads else shares(most, shard.num_ranks)
    start, end = shard.range_of(counts)
    is_shared = sum(counts) > len(cpus) or most < len(cpus)  # pinned threads would wait for CPUs that others use
    if is_shared or not parallel.pins_ranks:
        return replace(parallel, num_threads=counts[shard.rank], cpus=())
    return replace(parallel, num_threads=None, cpus=cpus[start:end])


def move_thread(cpus: tuple[int, ...]) -> None:
    """Let the calling thread continue on one of these CPUs. It is not bound to them, nor are threads that it starts,
    but it stays as a rule, since ranks that are bound to the other CPUs keep these busy."""
    allowed = os.sched_getaffinity(0)
    with suppress(OSError):  # the process may no longer use them
        os.sched_setaffinity(0, cpus)
        os.sched_setaffinity(0, allowed)
