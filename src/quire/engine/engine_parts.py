"""What an LLMEngine is made of, and the calls that concern one of its parts and no request."""

import time
from collections.abc import Sequence
from typing import Self

from quire.common.errors import ConfigError, RequestError
from quire.common.log import logger, show_messages
from quire.common.lora import LoRARequest
from quire.common.outputs import EngineStats
from quire.common.params import SamplingParams
from quire.config.args import EngineArgs
from quire.engine.adapters import AdapterTable, AnyAdapter
from quire.engine.drafting.drafting import make_drafting
from quire.engine.metrics import EngineMetrics, Metric
from quire.engine.requests.grammar_queue import GrammarQueue
from quire.engine.requests.input_processor import InputProcessor, Prompt
from quire.engine.requests.recommended import recommended_params, tokenizer_of
from quire.engine.requests.sequence import SequenceGroup
from quire.engine.routing.replicas import check_one_engine
from quire.engine.scheduling.loaded_adapters import LoadedAdapters
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.stats import engine_stats
from quire.engine.step.commit import Committer
from quire.kv.no_blocks import make_block_manager
from quire.kv.prefix_cache.pins import PinnedPrefix
from quire.runner.executor import Executor, SleepingExecutor, make_executor
from quire.runner.memory_plan import MemoryPlan, plan_memory
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizer.callable_tokenizer import CallableTokenizer
from quire.text.tokenizer.tokenizer import Tokenizer

_COPY_BYTES_PER_S = 5e9  # a cautious estimate of how fast all threads together copy blocks between the tiers


class EngineParts:
    """Makes and owns the parts of an engine: adapters, pinned prefixes, tokenizer and metrics can be asked for here."""

    def __init__(self, plan: MemoryPlan, executor: Executor, tokenizer: Tokenizer) -> None:
        self.plan, self.config, self.model_config = plan, (config := plan.config), plan.config.model
        self.executor, self.pooler = executor, executor.pooler
        """The pooler says what the model can make of texts; None if it generates."""
        self.blocks = make_block_manager(plan.kv_cache, config.cache)
        block_copy_s, drafting = plan.kv_cache.block_bytes / _COPY_BYTES_PER_S, make_drafting(config)
        slots = self._slots = LoadedAdapters(config.lora, executor)
        self.adapters = AdapterTable(config.model, config.lora, on_change=slots.keep_only)
        """The LoRA adapters that requests may name."""
        self.scheduler = Scheduler(config.scheduler, self.blocks, time.monotonic, block_copy_s, slots, drafting)
        self.requests = self.scheduler.requests
        self.committer = Committer(self.requests, max_model_len=config.model.max_model_len, drafting=drafting)
        self._use_tokenizer(tokenizer)
        self._metrics = EngineMetrics(config.model.model) if config.measures_requests else None

    @classmethod
    def from_args(cls, args: EngineArgs) -> Self:
        """Plan the memory, print the plan, load all. Raises ConfigError, CheckpointError or OutOfMemoryError."""
        check_one_engine(args)
        show_messages()
        logger.info("%s", plan := plan_memory(args))
        tokenizer = tokenizer_of(plan.config.model)
        engine = cls(plan, make_executor(plan.config, plan.kv_cache), tokenizer)
        for request in args.lora_requests():
            engine.adapters.add(request)
        return engine

    from_engine_args = from_args  # vLLM's name

    def check_pin(self, prompt: Prompt, lora_request: AnyAdapter = None) -> None:
        """Raise a RequestError if the prompt is wrong, or larger than what may still be pinned."""
        _, token_ids, key = self.inputs.prompt(prompt, None, self.adapters.of_request(lora_request))
        self.blocks.pins.check(token_ids, key)

    def pin_prefix(self, prompt: Prompt, lora_request: AnyAdapter = None) -> PinnedPrefix:
        """Keep what the cache holds of a prompt until `unpin_prefix`; computes nothing. Raises RequestError."""
        _, token_ids, key = self.inputs.prompt(prompt, None, self.adapters.of_request(lora_request))
        return self.blocks.pins.pin(token_ids, key)

    def unpin_prefix(self, pin: PinnedPrefix) -> None:
        """Allow a pinned prefix to be evicted like any other. Raises RequestError if it is not pinned."""
        if not isinstance(pin, PinnedPrefix):
            raise RequestError(f"pin={pin!r}: must be the PinnedPrefix that pin_prefix returned")
        self.blocks.pins.unpin(pin.pin_id)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Add an adapter. Returns whether anything has changed. Raises RequestError or CheckpointError."""
        return self.adapters.get(lora_request.lora_name) != self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it finish. Returns False if it is unknown."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The ids of all adapters."""
        return {adapter.lora_int_id for adapter in self.adapters}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded from its first request on (AdapterTable.pin). Returns False if it is unknown."""
        return self.adapters.pin(lora_id)

    def is_sleeping(self) -> bool:
        """Whether weights and KV cache have been given back."""
        return isinstance(self.executor, SleepingExecutor)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, over SamplingParams' own defaults."""
        return recommended_params(self.model_config.generation_config)

    def get_tokenizer(self) -> CallableTokenizer:
        """Return the tokenizer, with the methods and defaults of transformers' tokenizers."""
        return CallableTokenizer(self.tokenizer)

    def _use_tokenizer(self, tokenizer: Tokenizer) -> None:
        model, self.tokenizer = self.model_config, tokenizer
        self.inputs = InputProcessor(self.plan.config, tokenizer, self.pooler)
        self.grammars = GrammarQueue(GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids))

    def stats(self) -> EngineStats:
        """The engine now."""
        return engine_stats(self.scheduler, self.blocks, self.committer, num_held=len(self.grammars))

    def get_metrics(self) -> list[Metric]:
        """Return the metrics, without requests of `advance`. Raises ConfigError if the engine does not measure them."""
        if self._metrics is None:
            raise ConfigError("requests are not measured: make the engine with disable_log_stats=False")
        return list(self._metrics.snapshot([self.stats()], self.plan.config.cache, self.plan.config.lora))

    def _measure(self, changed: Sequence[SequenceGroup]) -> None:
        if self._metrics is not None:
            self._metrics.observe(changed, self.committer.num_tokens)
