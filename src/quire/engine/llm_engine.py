"""The engine: requests in, steps, outputs out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from quire.common.batch import Batch, StepResult
from quire.common.errors import EngineBrokenError, RequestError, failure, failures_named
from quire.common.faults import fault_point
from quire.common.log import logger, show_messages
from quire.common.outputs import EngineStats, RequestOutput
from quire.common.params import BeamSearchParams, SamplingParams
from quire.config.args import EngineArgs
from quire.config.model import ModelConfig
from quire.engine.process.messages import Past
from quire.engine.requests.grammar_queue import GrammarQueue
from quire.engine.requests.input_processor import InputProcessor, Prompt, recommended_params
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.engine.step.containment import MAX_IN_VAIN, Suspects
from quire.engine.step.executor import Executor
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.pins import PinnedPrefix
from quire.runner.memory_plan import MemoryPlan, plan_memory
from quire.runner.worker import Worker
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizer.tokenizer import Tokenizer

_GRAMMAR_WAIT_S = 0.05
_COPY_BYTES_PER_S = 5e9
"""a cautious guess at how fast blocks are copied between the tiers, all threads together"""


class LLMEngine:
    """Runs many requests at once, step by step. Not thread-safe: one thread calls it.

    A wrong request is refused by `add_request` and touches nothing else. What fails in a step ends the request whose
    work it was, which comes back with its `error`; where that is not known the step is tried again, and if need be with
    ever fewer requests (see Suspects). The others' tokens do not change. An EngineBrokenError is the end of the engine.
    After an interrupt no request has advanced, and the step can be tried again.
    """

    def __init__(self, plan: MemoryPlan, executor: Executor, tokenizer: Tokenizer) -> None:
        config = plan.config
        self.plan = plan
        self.model_config: ModelConfig = config.model
        self.tokenizer = tokenizer
        self.executor = executor
        self.blocks = BlockSpaceManager(
            plan.kv_cache,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            watermark=config.cache.watermark,
            pinned_fraction=config.cache.pinned_fraction,
        )
        block_copy_s = plan.kv_cache.block_bytes / _COPY_BYTES_PER_S
        self.scheduler = Scheduler(config.scheduler, self.blocks, block_copy_s=block_copy_s)
        self.committer = Committer(
            self.scheduler, max_model_len=config.model.max_model_len, eos_token_ids=config.model.eos_token_ids
        )
        self.inputs = InputProcessor(config, tokenizer)
        self.grammars = GrammarQueue(GrammarCompiler(tokenizer, config.model.vocab_size, config.model.eos_token_ids))
        self._groups: dict[str, SequenceGroup] = {}
        self._thread = ThreadPoolExecutor(1, "quire-step")  # starts with the first step that is executed ahead
        self._ahead: tuple[Batch, Future[tuple[StepResult, float]]] | None = None
        self._planned: Batch | None = None  # and not committed
        self._changed: list[SequenceGroup] = []  # by steps, and not told yet
        self._suspects = Suspects()
        self._broken: EngineBrokenError | None = None

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Plan the memory, say so, load the checkpoint. Raises ConfigError, CheckpointError or OutOfMemoryError."""
        show_messages()
        plan = plan_memory(args)
        logger.info("%s", plan)
        tokenizer = Tokenizer.from_path(plan.config.model.tokenizer_path)
        config = plan.config
        worker = Worker(config.model, plan.kv_cache, config.parallel, logprobs_mode=config.logprobs_mode)
        return cls(plan, worker, tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        arrival_time: float | None = None,
        past: Past | None = None,
    ) -> None:
        """Queue a request, or go on with its `past` in another engine. Raises a RequestError, and queues nothing, if it
        can never run."""
        self._check_request_id(request_id)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        seq_id = self.scheduler.new_seq_id()
        with failures_named(request_id, "when it was taken in"):
            group = self.inputs.request(request_id, prompt, params, seq_id, arrival_time)
            if past is not None:
                group.resume(past.token_ids, past.metrics, past.num_cached_tokens)
            self._add(group)

    def add_scoring_request(self, request_id: str, context: Prompt, continuation: Prompt | None) -> None:
        """Queue a request that generates nothing: it ends, with `prompt_logprobs` of the continuation's tokens, once
        they are scored; None scores the context itself. Raises a RequestError, and queues nothing, if it can never
        run."""
        self._check_request_id(request_id)
        seq_id = self.scheduler.new_seq_id()
        with failures_named(request_id, "when it was taken in"):
            self._add(self.inputs.scoring_request(request_id, context, continuation, seq_id, time.monotonic()))

    def _check_request_id(self, request_id: str) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")

    def _add(self, group: SequenceGroup) -> None:
        (self.scheduler if group.params.structured_outputs is None else self.grammars).add(group)
        self._groups[group.request_id] = group

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, commit. Returns the requests that got a token or finished, as their output_kind says.

        Raises EngineBrokenError once it is broken and everybody has been told what there is.
        """
        return self._outputs(self._advance())

    def advance(self) -> list[SequenceGroup]:
        """As `step`, for a caller that makes outputs in its own way of the requests that got a token or finished."""
        changed = self._advance()
        for group in changed:
            self._forget_if_finished(group)
        return changed

    def step_ahead(self) -> list[RequestOutput]:
        """As `step`, but the next step is being executed already, in a thread, while outputs are made (text and
        log-probabilities) and the caller does something with them. Worth it where that takes time, as in streaming.

        Until it is called again, requests may be added and aborted as ever; a new one starts a step later.
        """
        changed = self._advance()
        if self.scheduler.has_unfinished and self._broken is None:
            with self._contained():
                batch = self._schedule()
                self._ahead = batch, self._thread.submit(self._execute, batch)
        return self._outputs(changed)

    def _advance(self) -> list[SequenceGroup]:
        """A step. Who has changed by it, or in steps before that failed later on."""
        if self._broken is None:
            with self._contained():
                if self._ahead is None:
                    self._whole_step()
                else:
                    self._end_step()
                fault_point("step.end")
        changed, self._changed = self._changed, []
        if self._broken is not None and not changed:
            raise self._broken
        return changed

    def _schedule(self) -> Batch:
        """A plan. Requests whose own planning fails are ended first."""
        while True:
            self._planned = None
            fault_point("step.start")
            if self.grammars:
                self._admit_compiled()
            try:
                self._planned = self.scheduler.schedule(self._suspects.to_run(self._groups.values()))
                return self._planned
            except Exception as error:
                group = self.scheduler.in_hand
                with self._accounting():
                    if group is None:
                        raise
                    self.scheduler.revert()
                self._suspects.failed([])
                self._blame(group, "when it was planned", error)

    def _execute(self, batch: Batch) -> tuple[StepResult, float]:
        """The result, and the seconds it took."""
        start_s = time.monotonic()
        fault_point("step.execute")
        result = self.executor.execute(batch)
        fault_point("step.commit")
        return result, time.monotonic() - start_s

    def _whole_step(self) -> None:
        batch = self._schedule()
        try:
            result, seconds = self._execute(batch)
        except BaseException:
            self._revert()
            raise
        self._commit(batch, result, seconds)

    def _end_step(self) -> None:
        """Wait for the step that is being executed; if that is interrupted, it is there to be waited for again."""
        assert self._ahead is not None
        batch, execution = self._ahead
        try:
            result, seconds = execution.result()
        except BaseException:
            if execution.done():
                self._ahead = None
                self._revert()
            raise
        self._ahead = None
        self._commit(batch, result, seconds)

    def _commit(self, batch: Batch, result: StepResult, seconds: float) -> None:
        self._planned = None
        with self._accounting():
            self.scheduler.step_time.observe(batch.num_tokens, seconds)
            self._changed += self.committer.commit(batch, result)
            self._changed += [self._groups[request_id] for request_id in batch.ignored if request_id in self._groups]
            self._changed += self.grammars.take_failed()
        self._suspects.succeeded(has_run=bool(batch.sequences))

    # What fails

    def _revert(self) -> None:
        with self._accounting():
            self.scheduler.revert()

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        """An exception in here leaves accounts that nobody can rely on."""
        try:
            yield
        except Exception as error:
            self._broken = EngineBrokenError(f"the engine's accounts are wrong: {type(error).__name__}: {error}")
            raise self._broken from error

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """A step that fails is undone, and tried again until it is known whom to blame. Of an engine that is broken
        `_advance` tells."""
        try:
            yield
        except Exception as error:
            if self._broken is not None:
                return
            logger.warning("a step failed, and is tried again", exc_info=error)
            planned = () if self._planned is None else self._planned.sequences
            owners = [owner for s in planned if (owner := self.scheduler.owner(s.seq_id)) is not None]
            groups = list(dict.fromkeys(group for group, _ in owners))
            guilty = self._suspects.failed(groups)
            with suppress(EngineBrokenError):
                self._blame(guilty, "when it was executed", error)

    def _blame(self, group: SequenceGroup | None, when: str, error: Exception) -> None:
        """End the request that made a step fail, if it is known. Raises EngineBrokenError where it cannot be one."""
        if group is not None:
            self._changed.append(group)
            self._end_failed(group, when, error)
        if self._suspects.num_in_vain > MAX_IN_VAIN:
            why = f"{self._suspects.num_in_vain} failures and no step between them that succeeded"
            self._broken = EngineBrokenError(why)
            raise self._broken from error

    def _end_failed(self, group: SequenceGroup, when: str, error: Exception) -> None:
        """End a request in whose own work something failed. Raises EngineBrokenError if not only that went wrong."""
        group.error = failure(group.request_id, when, error)
        logger.error("%s", group.error, exc_info=error)
        with self._accounting():
            self._abort(group)
            self.scheduler.check_integrity()

    def fail_request(self, group: SequenceGroup, when: str, error: Exception) -> None:
        """End a request of which a caller of `advance` cannot tell what has changed. Raises EngineBrokenError."""
        self._end_failed(group, when, error)
        self._forget_if_finished(group)

    def _outputs(self, changed: list[SequenceGroup]) -> list[RequestOutput]:
        return [output for group in changed if (output := self._output(group)) is not None]

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and take its blocks back; None if it is unknown or finished already."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        self._abort(group)
        return self._output(group)

    def _abort(self, group: SequenceGroup) -> None:
        is_queued = self._broken is None and not self.grammars.remove(group)
        if is_queued and not group.is_finished:  # else in a failed step, and nobody has been told
            self.scheduler.remove(group)
        for seq in group.unfinished_seqs:
            seq.status = SequenceStatus.FINISHED_ABORTED

    def check_pin(self, prompt: Prompt) -> None:
        """Raise a RequestError if the prompt is wrong, or larger than what may still be pinned."""
        _, token_ids, key = self.inputs.prompt(prompt)
        self.blocks.check_pin(token_ids, key)

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Keep what the cache holds of a prompt until `unpin_prefix`; computes nothing. Raises RequestError."""
        _, token_ids, key = self.inputs.prompt(prompt)
        return self.blocks.pin(token_ids, key)

    def unpin_prefix(self, pin: PinnedPrefix) -> None:
        """Let a pinned prefix be evicted like any other. Raises RequestError if it is not pinned."""
        self.blocks.unpin(pin.pin_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._groups) or self._ahead is not None

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, over SamplingParams' own defaults."""
        return recommended_params(self.model_config.generation_config)

    def stats(self) -> EngineStats:
        """The engine now."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting + len(self.grammars),
            num_swapped=len(self.scheduler.swapped),
            num_blocks=self.blocks.pool.num_blocks,
            num_used_blocks=self.blocks.num_used_blocks,
            num_cached_blocks=self.blocks.pool.num_cached_blocks,
            num_steps=self.scheduler.num_steps,
            num_prompt_tokens=self.committer.num_prompt_tokens,
            num_generated_tokens=self.committer.num_generated_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_swapped_blocks=self.scheduler.num_swapped_blocks,
            num_prefix_queried_tokens=self.blocks.stats.num_queried_tokens,
            num_prefix_hit_tokens=self.blocks.stats.num_hit_tokens,
            num_pinned_blocks=self.blocks.pins.num_blocks,
            prefix_cache=self.blocks.stats.to_dict(),
        )

    def _admit_compiled(self) -> None:
        """Let requests start whose grammars are ready; where there is nothing else to do, wait for one a little."""
        if not self.scheduler.has_unfinished:
            self.grammars.wait(_GRAMMAR_WAIT_S)
        self.grammars.admit(self.scheduler)

    def _output(self, group: SequenceGroup) -> RequestOutput | None:
        """What a request's caller is told now; a finished request is forgotten."""
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
            if group in self._changed:  # it ended in the plan of the step after the one of which is told
                self._changed.remove(group)
