"""Which layers, CPUs and blocks each stage has, and what cannot be divided into stages."""

from collections.abc import Sequence
from dataclasses import replace

from quire.common.errors import ConfigError
from quire.config.args import EngineConfig
from quire.config.parallel import Shard, divide_layers
from quire.models.decoder.model import Decoder
from quire.models.registry import class_of
from quire.models.weights.usage import layer_bytes, weight_use
from quire.runner.parallel.placing import rank_threads


def divided(config: EngineConfig) -> EngineConfig:
    """The config with the layers of each stage. Raises ConfigError, before any weight is read, for a model that cannot
    be divided into that many stages."""
    num_stages, model = config.parallel.pipeline_parallel_size, config.model
    if num_stages == 1:
        return config
    unsupported = {
        "models that pool texts (runner='pooling') run in one process each": model.runner == "pooling",
        "modules of transformers (model_impl='transformers') run in one process each": model.model_impl
        == "transformers",
        "weights that stay in a file (weights_from_file='always') run in one process each": model.weights_from_file
        == "always",
        "a draft head (speculative_config) reads hidden states of several stages": config.draft is not None
        and config.draft.head is not None,
    }
    for what, is_given in unsupported.items():
        if is_given:
            raise ConfigError(f"pipeline_parallel_size={num_stages}: {what}; leave it at 1")
    if not issubclass(class_of(model), Decoder):
        raise ConfigError(f"pipeline_parallel_size={num_stages}: {model.architecture} has no layers to be divided")
    sizes = layer_bytes(model)
    if config.draft is not None:
        sizes[-1] += weight_use(config.draft).num_bytes
    config = replace(config, parallel=replace(config.parallel, stages=divide_layers(sizes, num_stages)))
    stage_configs(config)  # checks the CPUs
    return config


def stage_configs(config: EngineConfig) -> list[EngineConfig]:
    """The config of each stage, as of an engine without stages; the stages of this machine have CPUs of their own. The
    config alone without stages."""
    if not config.parallel.stages:
        return [config]
    parallel, num_ranks = config.parallel, config.parallel.tensor_parallel_size
    last = len(parallel.stages) - 1
    configs = []
    for number, layers in enumerate(parallel.stages):
        shards = [Shard(number * num_ranks + rank, len(parallel.stages) * num_ranks) for rank in range(num_ranks)]
        threads = [rank_threads(parallel, shard) for shard in shards]
        cpus = tuple([cpu for each in threads for cpu in each.cpus])
        configs.append(
            replace(
                config,
                model=replace(config.model, layers=layers),
                parallel=replace(threads[0], cpus=cpus, pipeline_parallel_size=1, stages=()),
                draft=config.draft if number == last else None,
            )
        )
    return configs


