"""Where a Batch is executed: in this process, or in others."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from quire.common.batch import Batch, StepResult
from quire.common.errors import ConfigError
from quire.common.params import PoolerInfo
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.runner.parallel.executor import RanksExecutor
from quire.runner.parallel.pipeline.executor import PipelineExecutor, StageExecutor
from quire.runner.worker import Worker, make_worker


class Executor(Protocol):
    """Executes batches in the order in which it is given them. Owns weights and cache memory; knows nothing of
    requests. A Batch and a StepResult are plain values that msgpack can carry (`quire.common.batch.encode`)."""

    pooler: PoolerInfo | None
    """What the model can make of texts; None if it generates."""

    def execute(self, batch: Batch) -> StepResult:
        """Move blocks, run the model, draw tokens. After an exception every request is as it was before the step."""

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """Load the LoRA adapter in a PEFT folder into a slot below max_loras, in the place of the one there.

        Raises CheckpointError, and changes nothing, if the adapter cannot be read, does not fit the model or has
        another digest than the one given; ConfigError if there is no such slot. No sequence that names the slot may be
        in a batch meanwhile.
        """

    def unload_adapter(self, slot: int) -> None:
        """Free a slot and its memory. It may be free already."""

    def close(self) -> None:
        """End what the executor runs besides this process. It is not used any more."""


class SleepingExecutor:
    """In place of the executor of an engine that sleeps."""

    pooler: PoolerInfo | None = None

    def execute(self, batch: Batch) -> StepResult:
        """Does nothing for a step without requests, as in an engine that is awake. Raises RuntimeError for others."""
        if batch.sequences:
            raise RuntimeError("the engine sleeps")
        return StepResult(())

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """Raises RuntimeError."""
        raise RuntimeError("the engine sleeps")

    def unload_adapter(self, slot: int) -> None:
        """Does nothing: no adapter is loaded."""

    def close(self) -> None:
        """Does nothing."""


def make_stage(config: EngineConfig, kv_cache: KVCacheConfig) -> StageExecutor:
    """What computes the layers of one stage of a pipeline. Raises what loading raises."""
    made = make_executor(config, kv_cache)
    assert isinstance(made, Worker | RanksExecutor)
    return made


EXECUTORS: dict[str, Callable[[EngineConfig, KVCacheConfig], Executor]] = {
    "in_process": make_worker,
    "ranks": RanksExecutor,
    "pipeline": partial(PipelineExecutor, make_stage),
}
"""by the name that ParallelConfig.executor gives"""


def make_executor(config: EngineConfig, kv_cache: KVCacheConfig) -> Executor:
    """The executor that the configuration names, with the model loaded. Raises ConfigError for an unknown name, or what
    loading raises."""
    name = config.parallel.executor_name
    if name not in EXECUTORS:
        raise ConfigError(f"executor={name!r} is unknown: allowed are {', '.join(EXECUTORS)}")
    return EXECUTORS[name](config, kv_cache)
