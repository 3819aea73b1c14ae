"""Which layers, CPUs and blocks each stage has, and what cannot be divided into stages."""

from dataclasses import replace

from quire.common.errors import ConfigError
from quire.config.args import EngineConfig
from quire.config.parallel import ParallelConfig, Shard, divide_layers
from quire.models.decoder.model import Decoder
from quire.models.registry import class_of
from quire.models.weights.usage import layer_bytes, weight_use
from quire.runner.parallel.placing import check_divisible, rank_threads


def divided(config: EngineConfig) -> EngineConfig:
    """The config with the layers of each stage. Raises ConfigError, before any weight is read, for a model that cannot
    be divided into that many stages."""
    num_stages, model, nodes = config.parallel.pipeline_parallel_size, config.model, config.parallel.nodes
    if nodes is not None and nodes.node_rank > 0:
        raise ConfigError(
            f"node_rank={nodes.node_rank}: this machine computes for machine 0; start it with `quire serve MODEL` and "
            "--nnodes, --node-rank and --master-addr"
        )
    if num_stages == 1:
        return config
    check_divisible(model, f"pipeline_parallel_size={num_stages}")
    if config.draft is not None and config.draft.head is not None:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: a draft head (speculative_config) reads hidden states of several "
            "stages; leave it at 1"
        )
    if not issubclass(class_of(model), Decoder):
        raise ConfigError(f"pipeline_parallel_size={num_stages}: {model.architecture} has no layers to be divided")
    sizes = layer_bytes(model)
    if config.draft is not None:
        sizes[-1] += weight_use(config.draft).num_bytes
    config = replace(config, parallel=replace(config.parallel, stages=divide_layers(sizes, num_stages)))
    stage_configs(config)  # checks the CPUs of this machine
    return config


def stage_configs(config: EngineConfig) -> list[EngineConfig]:
    """The config of each stage, as of an engine without stages. The config itself without stages."""
    if not config.parallel.stages:
        return [config]
    of_last = len(config.parallel.stages) - 1
    return [
        replace(
            config,
            model=replace(config.model, layers=layers),
            parallel=_threads_of(config.parallel, number),
            draft=config.draft if number == of_last else None,
        )
        for number, layers in enumerate(config.parallel.stages)
    ]


def own_stage_configs(config: EngineConfig) -> list[EngineConfig]:
    """Those of the stages of this machine."""
    return stage_configs(config)[-1 if config.parallel.nodes is not None else 0 :]


def _threads_of(parallel: ParallelConfig, number: int) -> ParallelConfig:
    """The threads of a stage, on CPUs of its own if all stages are on this machine. Other machines choose theirs."""
    alone = replace(parallel, pipeline_parallel_size=1, stages=(), nodes=None)
    if parallel.nodes is not None:
        return alone if number == len(parallel.stages) - 1 else replace(alone, num_threads=None, cpus=())
    num_ranks, num_stages = parallel.tensor_parallel_size, len(parallel.stages)
    shards = [Shard(number * num_ranks + rank, num_stages * num_ranks) for rank in range(num_ranks)]
    threads = [rank_threads(parallel, shard) for shard in shards]
    cpus = tuple([cpu for each in threads for cpu in each.cpus])
    return replace(alone, num_threads=threads[0].num_threads, cpus=cpus)
