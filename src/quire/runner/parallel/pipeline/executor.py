"""The engine's process of a pipeline: it has the last stage, so what is drawn needs no way back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from socket import socket

from quire.common import liveness
from quire.common.batch import Batch, StepResult, encode
from quire.common.errors import EngineBrokenError, error_named
from quire.common.params import PoolerInfo
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.stages import boundary
from quire.models.registry import class_of
from quire.runner.parallel.configs import to_bytes
from quire.runner.parallel.executor import RanksExecutor
from quire.runner.parallel.links import Launch, Links, StageProcess, check_loaded
from quire.runner.parallel.machines.nodes import admit, fingerprint
from quire.runner.parallel.messages import LoadAdapter, Start, UnloadAdapter
from quire.runner.parallel.pipeline.messages import StageStep, StepFailed
from quire.runner.parallel.pipeline.planning import stage_configs
from quire.runner.worker import Worker

StageExecutor = Worker | RanksExecutor
"""Computes the layers of one stage."""
MakeStage = Callable[[EngineConfig, KVCacheConfig], StageExecutor]


class PipelineExecutor:
    """Computes each step in stages, of which this process has the last one.

    All stages get the batch, and each but the first computes when it gets the states of the one before. A failure
    anywhere fails the step: the stages behind it pass it on. If a stage ends, so does this: each call raises
    EngineBrokenError.
    """

    pooler: PoolerInfo | None = None

    def __init__(
        self, make_stage: MakeStage, config: EngineConfig, kv_cache: KVCacheConfig, launch: Launch = StageProcess
    ) -> None:
        """Start the stages, and load the model in all. Raises what loading raises."""
        configs = stage_configs(config)
        caches = [kv_cache.of_stage(layers) for layers in config.parallel.stages]
        max_rows = kv_cache.max_chunk or config.model.max_model_len
        model = class_of(config.model)(replace(config.model, max_model_len=1))
        assert isinstance(model, Decoder)
        boundaries = [boundary(model, end) for _, end in config.parallel.stages[:-1]]
        nodes, sources = config.parallel.nodes, list[Launch | socket]([launch] * len(boundaries))
        if nodes is not None:
            sources = [sock for (sock,) in admit(nodes, fingerprint(config.model))]
        links = self._links = Links(boundaries, max_rows, sources)
        self._finalizer = liveness.Finalizer(self, links.close)
        self.num_in_flight = len(configs)
        self._num_steps = 0
        self._submitted: dict[int, int] = {}  # by the batch's step, the number under which it was sent
        self._own: StageExecutor | None = None
        try:
            shares = [to_bytes(*share) for share in zip(configs, caches, strict=True)]
            starts = [
                Start(number, share, hang_timeout_s=liveness.hang_timeout_s) for number, share in enumerate(shares[:-1])
            ]
            links.send_each(starts)
            self._own = make_stage(configs[-1], caches[-1])
            check_loaded(links.wait())
        except BaseException:
            self.close()
            raise

    @property
    def _stage(self) -> StageExecutor:
        assert self._own is not None
        return self._own

    def submit(self, batch: Batch) -> None:
        """Let the other stages compute a batch, before `execute` is called with it; batches in the same order."""
        self._finalizer.check()
        self._num_steps += 1
        self._submitted[batch.step] = self._num_steps
        self._links.send(StageStep(self._num_steps, encode(batch)))

    def execute(self, batch: Batch) -> StepResult:
        """As Executor."""
        self._finalizer.check()
        if batch.step not in self._submitted:
            self.submit(batch)
        message = self._links.states(self._submitted[batch.step])
        self._submitted = {step: number for step, number in self._submitted.items() if step > batch.step}
        if isinstance(message, StepFailed):
            raise error_named(message.kind, message.text)
        if message.num_rows != batch.num_tokens:
            raise EngineBrokenError(f"a stage computed {message.num_rows} rows of {batch.num_tokens}")
        return self._stage.execute(batch, message.tensors)

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """As Executor, in all stages."""
        self._finalizer.check()
        self._stage.load_adapter(slot, folder, digest)
        self._links.send(LoadAdapter(slot, folder, digest))
        if failures := self._links.failures():
            self.unload_adapter(slot)
            raise error_named(failures[0].kind, failures[0].text)

    def unload_adapter(self, slot: int) -> None:
        """As Executor, in all stages."""
        self._finalizer.check()
        self._stage.unload_adapter(slot)
        self._links.send(UnloadAdapter(slot))
        if failures := self._links.failures():
            raise EngineBrokenError(f"a stage could not unload an adapter: {failures[0].text}")

    def close(self) -> None:
        """End the other stages, and the ranks of this one."""
        self._finalizer()
        if self._own is not None:
            self._own.close()
