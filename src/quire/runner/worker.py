"""One process's share of the engine: its threads, weights, cache memory and runner."""

from quire import kernels
from quire.common.batch import Batch, StepResult
from quire.common.faults import fault_point
from quire.common.params import LogprobsMode
from quire.config.kv_cache import KVCacheConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.models.weights.loader import load_causal_lm
from quire.runner.cache_engine import CacheEngine
from quire.runner.model_runner import ModelRunner


class Worker:
    """Executes batches in this process."""

    def __init__(
        self,
        model: ModelConfig,
        kv_cache: KVCacheConfig,
        parallel: ParallelConfig,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        backend = kernels.backend_for("cpu")
        self._threads = backend.threads(parallel.num_threads, parallel.cpus)
        self.cache_engine = CacheEngine(kv_cache, backend)
        with self._threads:
            loaded = load_causal_lm(model)
        self.runner = ModelRunner(
            loaded, self.cache_engine.layers, kv_cache.block_size, model.max_model_len, logprobs_mode
        )

    def execute(self, batch: Batch) -> StepResult:
        """Move blocks, run the model, draw tokens."""
        with self._threads:
            self.cache_engine.transfer(batch.transfers)
            self.cache_engine.copy_slots(batch.copies)
            fault_point("step.run")
            return self.runner.run(batch)
