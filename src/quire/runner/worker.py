"""One process's share of the engine: its threads, weights, cache memory and runner."""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from quire import kernels
from quire.common.batch import Batch, ScheduledSequence, StepResult
from quire.common.errors import CheckpointError, ConfigError
from quire.common.faults import fault_point
from quire.common.params import LogprobsMode, PoolerInfo
from quire.config.args import EngineConfig
from quire.config.checkpoint.draft_heads import HeadConfig
from quire.config.kv_cache import KVCacheConfig
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.models.adapters.peft import read_adapter
from quire.models.adapters.slots import AdapterSlots
from quire.models.base import CausalLM, PoolingModel
from quire.models.decoder.model import Decoder
from quire.models.decoder.stages import StageStates
from quire.models.heads.head import DraftHead
from quire.models.weights.loader import load_model, load_servable, whole_model
from quire.runner.cache_engine import CacheEngine
from quire.runner.draft_runner import Announce, DraftRunner, Passes
from quire.runner.head_runner import HeadRunner
from quire.runner.model_runner import ModelRunner
from quire.runner.pooling import pooler_info

States = Sequence[bytes | memoryview]
"""What one stage of layers gives to the next one: the bytes of each tensor of a Boundary."""


class Worker:
    """Executes batches in this process."""

    def __init__(
        self,
        model: ModelConfig,
        kv_cache: KVCacheConfig,
        parallel: ParallelConfig,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        lora: LoRAConfig | None = None,
        draft: ModelConfig | None = None,
        ranks: kernels.Ranks | None = None,
    ) -> None:
        """Without `lora`, no adapters can be loaded. `draft` is a model that drafts for the other. With `ranks`, this
        is one of several processes that compute each step together: `kv_cache` is its part, and rank 0 alone returns
        tokens."""
        backend = kernels.backend_for("cpu")
        self._threads = backend.threads(parallel.num_threads, parallel.cpus)
        self.cache_engine = CacheEngine(kv_cache, backend)
        with self._threads:
            loaded = load_servable(model, ranks)
        self._model, self._ranks = loaded, ranks
        self._adapted = loaded if lora is None or model.layers is None else whole_model(model)
        """What adapters must fit: all layers, of which a stage has some."""
        self._adapters = None if lora is None else AdapterSlots(loaded, lora)
        self._states: StageStates | None = None
        if model.layers is not None:
            assert isinstance(loaded, Decoder)
            self._states = StageStates(loaded, kv_cache.max_chunk or model.max_model_len)
        self.pooler: PoolerInfo | None = None
        """What the model can make of texts; None if it generates."""
        if isinstance(loaded, PoolingModel):
            longest = kv_cache.max_chunk or model.max_model_len
            nothing = kv_cache.keeps_nothing
            self.pooler = pooler_info(loaded.pooler, model, longest, keeps_nothing=nothing)
        self.runner = ModelRunner(
            loaded,
            self.cache_engine.layers,
            kv_cache.block_size,
            model.max_model_len,
            backend,
            logprobs_mode,
            self._adapters,
            ranks=ranks,
            passes_on=self._states is not None and self._states.passes_on,
        )
        self._drafts = None if draft is None else self._draft_runner(model, draft, backend)

    def _draft_runner(self, model: ModelConfig, draft: ModelConfig, backend: kernels.Backend) -> DraftRunner:
        cache = self.cache_engine
        if draft.head is not None:
            return self._head_runner(model, draft, draft.head, backend)
        with self._threads:
            loaded = load_servable(draft, self._ranks)
        assert isinstance(loaded, CausalLM)
        layers, block_size = cache.draft_layers, cache.config.block_size
        return DraftRunner(
            Passes(loaded, layers, block_size, model.max_model_len, backend, backend.workspace()),
            vocab_sizes=(draft.vocab_size, model.vocab_size),
            max_len=draft.max_model_len,
            backend=backend,
        )

    def _head_runner(
        self, model: ModelConfig, draft: ModelConfig, config: HeadConfig, backend: kernels.Backend
    ) -> HeadRunner:
        """From here on the model keeps the hidden states that the head reads."""
        cache, drafted = self.cache_engine, self._model
        with self._threads:
            head = load_model(draft, self._ranks)
        assert isinstance(head, DraftHead)
        assert isinstance(drafted, Decoder)
        head.share(drafted)
        return HeadRunner(
            head,
            cache.draft_layers,
            cache.config.block_size,
            states=drafted.watch(config.places, cache.config.max_chunk or model.max_model_len),
            targets=config.targets,
            max_len=model.max_model_len,
            vocab_size=model.vocab_size,
            backend=backend,
        )

    def execute(self, batch: Batch, states: States = ()) -> StepResult:
        """Move blocks, run the model, draw tokens, draft. A stage that is not the first gets the `states` of the one
        before; one that is not the last draws nothing."""
        with self._threads:
            self._begin(batch, states)
            fault_point("step.run")
            result = self.runner.run(batch)
            return result if self._drafts is None else self._drafts.run(batch.sequences, result)

    def follow(self, batch: Batch, states: States = ()) -> None:
        """As `execute`, in a rank that returns no tokens."""
        with self._threads:
            self._begin(batch, states)
            self.runner.run(batch)

    def _begin(self, batch: Batch, states: States) -> None:
        if batch.transfers:
            self.cache_engine.transfer(batch.transfers)
        if batch.copies:
            self.cache_engine.copy_slots(batch.copies)
        if self._states is not None:
            self._states.put(states, batch.num_tokens)

    def states(self) -> States:
        """What the next stage needs of the latest step, valid until the next one."""
        return () if self._states is None else self._states.take()

    def lead_drafts(self, announce: Announce, when_failed: Callable[[], object]) -> None:
        """From now on `announce` is called before each pass of what drafts, so that other ranks can follow it, and
        `when_failed` after one that failed here."""
        if self._drafts is not None:
            self._drafts.announce, self._drafts.when_failed = announce, when_failed

    def follow_draft(self, sequences: Sequence[ScheduledSequence], rows: Sequence[int], *, is_first: bool) -> None:
        """Run a pass of what drafts, as rank 0 announced it."""
        assert self._drafts is not None
        with self._threads:
            self._drafts.follow(sequences, rows, is_first=is_first)

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """Read the adapter in `folder` and put it into a slot; as it was if this raises."""
        adapters = self._slots()
        with self._threads:
            adapter = read_adapter(folder, self._adapted, adapters.max_rank)
            if digest not in (None, adapter.digest):
                raise CheckpointError(f"{folder} has changed since the adapter was added: add it again")
            adapters.load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Free a slot and its memory."""
        self._slots().unload(slot)

    def close(self) -> None:
        """Does nothing: all is in this process."""

    def _slots(self) -> AdapterSlots:
        if self._adapters is None:
            raise ConfigError("this engine was made without adapters: set enable_lora")
        return self._adapters


def make_worker(config: EngineConfig, kv_cache: KVCacheConfig, ranks: kernels.Ranks | None = None) -> Worker:
    """The worker of an engine, or one of its ranks, with the model loaded. Raises what loading raises."""
    _use_one_torch_thread_after_forks()
    return Worker(config.model, kv_cache, config.parallel, config.logprobs_mode, config.lora, config.draft, ranks)


@cache
def _use_one_torch_thread_after_forks() -> None:
    """torch's threads do not exist in a forked child, where its operators would wait for them for ever."""
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
