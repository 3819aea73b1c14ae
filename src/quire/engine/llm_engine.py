"""The engine: requests in, steps, outputs out."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from quire.common.batch import Batch, StepResult
from quire.common.errors import ConfigError, EngineBrokenError, RequestError, TokenizerError, failure, failures_named
from quire.common.faults import fault_point
from quire.common.log import logger, show_messages
from quire.common.lora import LoRARequest
from quire.common.memory import give_back_memory
from quire.common.outputs import EngineStats, RequestOutput
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.common.params.checks import check_request_id
from quire.config.args import EngineArgs
from quire.engine.adapters import AdapterTable, AnyAdapter
from quire.engine.drafting.drafting import make_drafting
from quire.engine.metrics import EngineMetrics, Metric
from quire.engine.process.messages import Progress
from quire.engine.requests.grammar_queue import GrammarQueue
from quire.engine.requests.input_processor import InputProcessor, Prompt
from quire.engine.requests.new_group import new_group, new_scoring_group
from quire.engine.requests.recommended import recommended_params, tokenizer_of
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.routing.replicas import check_one_engine
from quire.engine.scheduling.loaded_adapters import LoadedAdapters
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.stats import engine_stats
from quire.engine.step.commit import Committer
from quire.engine.step.containment import MAX_CONSECUTIVE_FAILURES, Accounting, FailureIsolator
from quire.engine.step.in_flight import StepsInFlight
from quire.kv.no_blocks import make_block_manager
from quire.kv.prefix_cache.pins import PinnedPrefix
from quire.runner.executor import Executor, SleepingExecutor, make_executor
from quire.runner.memory_plan import MemoryPlan, plan_memory
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizer.callable_tokenizer import CallableTokenizer
from quire.text.tokenizer.tokenizer import Tokenizer

_GRAMMAR_WAIT_S = 0.05
_COPY_BYTES_PER_S = 5e9  # a cautious estimate of how fast all threads together copy blocks between the tiers


class LLMEngine:
    """Runs many requests at once, step by step. Not thread-safe: one thread calls it.

    A wrong request is refused by `add_request` and touches nothing else. A failure in a request's own work ends that
    request, which comes back with its `error`. Where a step fails and the cause is unknown, it is tried again, if need
    be with fewer requests (see FailureIsolator). The tokens of other requests do not change. An EngineBrokenError is
    the end of the engine. After an interrupt no request has advanced, and the step can be tried again.
    """

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
        self._groups: dict[str, SequenceGroup] = {}
        self.in_use = threading.Lock()
        """Held by the call that steps it to the end of its requests."""
        self._is_planning = False  # the scheduler is at work, or has raised
        self._changed: list[SequenceGroup] = []  # by steps, and not returned yet
        self._isolator, self._accounting = FailureIsolator(), Accounting()
        self._in_flight = StepsInFlight(self.requests, executor)

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
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

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        progress: Progress | None = None,
        lora_request: AnyAdapter = None,
    ) -> None:
        """Queue a request, or continue one with the `progress` it made in another engine. Raises a RequestError, and
        queues nothing, if it can never run. `lora_request` names an adapter, which is added if it is new."""
        self._check_request_id(request_id)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        try:
            adapter = None if lora_request is None else self.adapters.of_request(lora_request)
            request = self.inputs.request(request_id, prompt, params, arrival_time, adapter)
            group = new_group(self.inputs, request, self.requests.new_seq_id())
            if progress is not None:
                group.resume(progress.token_ids, progress.metrics, progress.num_cached_tokens)
            self._add(group)
        except Exception:
            with failures_named(request_id, "when it was added"):
                raise

    def add_scoring_request(
        self, request_id: str, context: Prompt, continuation: Prompt | None, *, lora_request: AnyAdapter = None
    ) -> None:
        """Queue a request that ends once the continuation's tokens, or the context's own for None, are scored in
        `prompt_logprobs`. It generates nothing. Raises a RequestError, and queues nothing, if it can never run."""
        self._check_request_id(request_id)
        with failures_named(request_id, "when it was added"):
            adapter = self.adapters.of_request(lora_request)
            request = self.inputs.scoring_request(request_id, context, continuation, time.monotonic(), adapter)
            self._add(new_scoring_group(request, self.requests.new_seq_id()))

    def _check_request_id(self, request_id: str) -> None:
        if self.is_sleeping:
            raise RequestError("the engine sleeps: call wake_up() first")
        check_request_id(request_id)
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")

    def _add(self, group: SequenceGroup) -> None:
        (self.requests if group.params.structured_outputs is None else self.grammars).add(group)
        self._groups[group.request_id] = group
        self._slots.use(group)

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, commit. Returns the requests that got a token or finished, as their output_kind says.
        Raises EngineBrokenError once the engine is broken and every request has been returned."""
        changed = self._contained_step()
        outputs = [output for group in changed if (output := self._output(group)) is not None]
        self._measure(changed)  # also what has failed only now
        return outputs

    def advance(self) -> list[SequenceGroup]:
        """As `step`, for a caller that makes its own outputs and metrics of the requests that have changed."""
        for group in (changed := self._contained_step()):
            self._forget_if_finished(group)
        return changed

    def _step(self) -> None:
        batch = self._schedule()
        result = self._execute(batch)
        self._commit(batch, result)

    def _schedule(self) -> Batch:
        """The plan of the next step: the oldest of the plans that the executor computes at once."""
        fault_point("step.start")
        if self.grammars:
            self.grammars.admit(self.requests, _GRAMMAR_WAIT_S)
        given = self._isolator.to_run(groups := self._groups.values()), groups
        while self._in_flight.has_room(*given):
            only, self._is_planning = self._in_flight.share(*given), True
            self._in_flight.add(self.scheduler.schedule(only))
            self._is_planning = False
        return self._in_flight.oldest

    def _execute(self, batch: Batch) -> StepResult:
        """The batch's result. If there is none, no request has advanced."""
        try:
            start_s = time.monotonic()
            self._in_flight.submit()
            fault_point("step.execute")
            result = self.executor.execute(batch)
            fault_point("step.commit")
            self.scheduler.observe(batch, time.monotonic() - start_s, result.drafting_s, result.num_passes)
            return result
        except BaseException:
            self._revert_in_flight()
            raise

    def _revert_in_flight(self) -> None:
        with self._accounting:
            self._in_flight.revert()

    def _commit(self, batch: Batch, result: StepResult) -> None:
        """Apply the result: here requests advance, and nowhere else."""
        with self._accounting:
            self._in_flight.take()
            self._changed += self.committer.commit(batch, result)
            self._changed += [self._groups[i] for i in batch.ignored if i in self._groups] if batch.ignored else []
            self._changed += self.grammars.take_failed()
        self._isolator.succeeded(has_run=bool(batch.sequences))
        fault_point("step.end")

    def _contained_step(self) -> list[SequenceGroup]:
        """A step whose failure ends at most one request. Returns the requests that it changed, and those that earlier
        steps changed before they failed."""
        if self._accounting.error is None:
            try:
                self._step()
            except Exception as error:
                with suppress(EngineBrokenError):
                    self._contain(error)
            except BaseException:  # an interrupt
                if self._is_planning:
                    self._revert_plan()
                raise
        changed, self._changed = self._changed, []
        if self._accounting.error is not None and not changed:
            raise self._accounting.error
        return changed

    def _contain(self, error: Exception) -> None:
        """End the request that made the step fail, if it is known. Raises EngineBrokenError where it cannot be one."""
        self._accounting.error = error if isinstance(error, EngineBrokenError) else self._accounting.error
        if self._accounting.error is not None:
            raise self._accounting.error
        logger.warning("a step failed, and is tried again", exc_info=error)
        if self._is_planning:
            culprit, when = self.requests.planning_group, "when it was planned"
            self._revert_plan(None if culprit is not None else error)
            self._isolator.failed([])
        else:
            failed, owners = self._in_flight.take_failed(), self.requests.owners
            groups = list(dict.fromkeys([owners[s.seq_id][0] for s in failed if s.seq_id in owners]))
            culprit, when = self._isolator.failed(groups), "when it was executed"
        if culprit is not None:
            self._changed.append(culprit)
            self._end_failed(culprit, when, error)
        if (num_failures := self._isolator.num_consecutive_failures) > MAX_CONSECUTIVE_FAILURES:
            message = f"{num_failures} failures without a step in between that succeeded"
            self._accounting.error = EngineBrokenError(message)
            raise self._accounting.error from error

    def _revert_plan(self, error: Exception | None = None) -> None:
        """Undo a plan that was not finished. Raises EngineBrokenError for an `error` that is no request's own."""
        self._is_planning = False
        with self._accounting:
            if error is not None:
                raise error
            self.requests.revert()

    def _end_failed(self, group: SequenceGroup, when: str, error: Exception) -> None:
        """End a request whose own work failed. Raises EngineBrokenError if more than that is wrong."""
        group.error = failure(group.request_id, when, error)
        logger.error("%s", group.error, exc_info=error)
        with self._accounting:
            self._abort(group)
            self.requests.check_integrity()

    def fail_request(self, group: SequenceGroup, when: str, error: Exception) -> None:
        """End a request whose output a caller of `advance` could not make. Raises EngineBrokenError."""
        self._end_failed(group, when, error)
        self._forget_if_finished(group)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks; None if it is unknown or has finished already."""
        if (group := self._groups.get(request_id)) is None:
            return None
        self._abort(group)
        self._changed = [other for other in self._changed if other is not group]
        self._measure([group])
        return self._output(group)

    def _abort(self, group: SequenceGroup) -> None:
        if self._accounting.error is None and not self.grammars.remove(group) and not group.is_finished:
            self.requests.remove(group)  # unless it ended in a failed step, and has not been returned yet
        for seq in group.unfinished_seqs:
            seq.finish(SequenceStatus.FINISHED_ABORTED)
            group.metrics.finished_time = time.monotonic()

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

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, except pinned ones. Returns False, and does nothing, while requests run, unless
        `reset_running_requests`: then these are preempted first, and compute their tokens so far again."""
        if self.has_unfinished_requests() and not reset_running_requests:
            return False
        self._revert_in_flight()
        for group in list(self.requests.running):
            self.scheduler.preemptor.preempt(group, may_swap=False)
        self.blocks.forget_cached()
        return True

    def sleep(self) -> None:
        """Give back weights and KV cache with all prefixes until `wake_up`. Raises RequestError while requests run."""
        if self.has_unfinished_requests():
            raise RequestError("the engine cannot sleep while requests run: wait for them, or abort them")
        self._revert_in_flight()
        for pin_id in list(self.blocks.pins.block_ids):
            self.blocks.pins.unpin(pin_id)
        self.blocks.forget_cached()
        self.executor.close()
        self.executor = SleepingExecutor()
        self._slots.clear(self.executor)
        gc.collect()
        give_back_memory()

    def wake_up(self) -> None:
        """Load the model again after `sleep`. Does nothing in an engine that is awake. Raises what loading raises."""
        if self.is_sleeping:
            self.executor = make_executor(self.plan.config, self.plan.kv_cache)
            self._slots.clear(self.executor)
            self._in_flight = StepsInFlight(self.requests, self.executor)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights and KV cache have been given back."""
        return isinstance(self.executor, SleepingExecutor)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._groups)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, over SamplingParams' own defaults."""
        return recommended_params(self.model_config.generation_config)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics, without requests of `advance`. Raises ConfigError if the engine does not measure them."""
        if self._metrics is None:
            raise ConfigError("requests are not measured: make the engine with disable_log_stats=False")
        return list(self._metrics.snapshot([self.stats()], self.plan.config.cache, self.plan.config.lora))

    def _measure(self, changed: Sequence[SequenceGroup]) -> None:
        if self._metrics is not None:
            self._metrics.observe(changed, self.committer.num_tokens)

    def get_tokenizer(self) -> CallableTokenizer:
        """Return the tokenizer, with the methods and defaults of transformers' tokenizers."""
        return CallableTokenizer(self.tokenizer)

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use another tokenizer. Raises RequestError while requests run, TokenizerError if it has too many tokens."""
        if self.has_unfinished_requests():
            raise RequestError("the tokenizer cannot be replaced while requests run: wait for them, or abort them")
        if tokenizer.vocab_size > (known := self.model_config.vocab_size):
            raise TokenizerError(f"{tokenizer.source} has {tokenizer.vocab_size} tokens, and the model {known}")
        self._use_tokenizer(tokenizer)

    def _use_tokenizer(self, tokenizer: Tokenizer) -> None:
        model, self.tokenizer = self.model_config, tokenizer
        self.inputs = InputProcessor(self.plan.config, tokenizer, self.pooler)
        self.grammars = GrammarQueue(GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids))

    def stats(self) -> EngineStats:
        """The engine now."""
        return engine_stats(self.scheduler, self.blocks, self.committer, num_held=len(self.grammars))

    def _output(self, group: SequenceGroup) -> RequestOutput | None:
        """The output that a request's caller receives now; a finished request is forgotten."""
        try:
            fault_point("output.make", group.request_id)
            output = group.to_output()
        except Exception as error:
            with suppress(EngineBrokenError):
                self._end_failed(group, "when its output was made", error)
            output = group.to_failed_output()
        self._forget_if_finished(group)
        return output

    def _forget_if_finished(self, group: SequenceGroup) -> None:
        if group.is_finished:
            self._groups.pop(group.request_id, None)
            self.grammars.forget(group)
            self._slots.release(group)
