"""The engine: requests in, steps, outputs out."""

import gc
import math
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from msgspec.structs import replace

from quire.common.batch import Batch, StepResult
from quire.common.errors import EngineBrokenError, RequestError, TokenizerError, failure, failures_named
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.common.memory import give_back_memory
from quire.common.outputs import RequestOutput
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.common.params.checks import check_number, check_request_id
from quire.engine.adapters import AnyAdapter
from quire.engine.engine_parts import EngineParts
from quire.engine.process.messages import Progress
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.new_group import new_group, new_scoring_group
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.step.containment import MAX_CONSECUTIVE_FAILURES, Accounting, FailureIsolator
from quire.engine.step.in_flight import StepsInFlight
from quire.engine.step.interrupts import interrupt_deferred
from quire.runner.executor import Executor, SleepingExecutor, make_executor
from quire.runner.memory_plan import MemoryPlan
from quire.text.tokenizer.tokenizer import Tokenizer

_GRAMMAR_WAIT_S = 0.05


class LLMEngine(EngineParts):
    """Runs many requests at once, step by step. Not thread-safe: one thread calls it.

    A wrong request is refused by `add_request` and touches nothing else. A failure in a request's own work ends that
    request, which comes back with its `error`. Where a step fails and the cause is unknown, it is tried again, if need
    be with fewer requests (see FailureIsolator). The tokens of other requests do not change. An EngineBrokenError is
    the end of the engine.

    Ctrl-C waits for the end of the step; what the step would have returned, the next one returns. Whatever else
    interrupts a step, such as a second Ctrl-C, undoes it if it comes while the executor computes, and otherwise breaks
    the engine.
    """

    def __init__(self, plan: MemoryPlan, executor: Executor, tokenizer: Tokenizer) -> None:
        super().__init__(plan, executor, tokenizer)
        self._groups: dict[str, SequenceGroup] = {}
        self.in_use = threading.Lock()
        """Held by the call that steps it to the end of its requests."""
        self._is_stepping = False  # or a step was interrupted, and its end not reached
        self._is_planning = False  # the scheduler is at work, or has raised
        self._changed: list[SequenceGroup] = []  # by steps, and not returned yet
        self._outputs: list[RequestOutput] = []  # of steps at whose end Ctrl-C was noticed, and not returned yet
        self._isolator, self._accounting = FailureIsolator(), Accounting()
        self._in_flight = StepsInFlight(self.requests, self.executor)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        progress: Progress | None = None,
        lora_request: AnyAdapter = None,
        priority: int | None = None,
    ) -> None:
        """Queue a request, or continue one with the `progress` it made in another engine. Raises a RequestError, and
        queues nothing, if it can never run. `arrival_time` is in seconds of time.monotonic. `lora_request` names an
        adapter, which is added if it is new. `priority` replaces that of the parameters."""
        self._check_request_id(request_id)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        check_number("arrival_time", arrival_time, -math.inf, math.inf, "a finite number of seconds")
        params = params if priority is None else replace(params, priority=priority)
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
        if self.is_sleeping():
            raise RequestError("the engine sleeps: call wake_up() first")
        check_request_id(request_id)
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")

    def _add(self, group: SequenceGroup) -> None:
        with interrupt_deferred():
            (self.requests if group.params.structured_outputs is None else self.grammars).add(group)
            self._groups[group.request_id] = group
            self._slots.use(group)

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, commit. Returns the requests that got a token or finished, as their output_kind says.
        Raises EngineBrokenError once the engine is broken and every request has been returned."""
        with interrupt_deferred():
            changed = self._contained_step()
            self._outputs += [output for group in changed if (output := self._output(group)) is not None]
            self._measure(changed)  # also what has failed only now
            self._is_stepping = False
        outputs, self._outputs = self._outputs, []
        return outputs  # Python looks for no interrupt between the two

    def advance(self) -> list[SequenceGroup]:
        """As `step`, for a caller that makes its own outputs and metrics of the requests that have changed."""
        for group in (changed := self._contained_step()):
            self._forget_if_finished(group)
        self._is_stepping = False
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
        except BaseException as error:
            self._revert_in_flight()
            self._is_stepping = isinstance(error, Exception)  # an interrupt has changed nothing
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
        steps changed before they failed. The caller unsets `_is_stepping` once they are all processed."""
        if self._is_stepping:
            self._accounting.interrupt()
        self._is_stepping = True
        if self._accounting.error is None:
            try:
                self._step()
            except Exception as error:
                with suppress(EngineBrokenError):
                    self._contain(error)
            except BaseException:
                if self._is_stepping:
                    self._accounting.interrupt()
                raise
        changed, self._changed = self._changed, []
        if self._accounting.error is not None and not (changed or self._outputs):
            self._is_stepping = False
            raise self._accounting.error
        return changed

    def _contain(self, error: Exception) -> None:
        """End the request that made the step fail, if it is known. Raises EngineBrokenError where it cannot be one."""
        if isinstance(error, EngineBrokenError):
            self._accounting.error = error
            raise error
        logger.warning("a step failed, and is tried again", exc_info=error)
        if self._is_planning:
            self._is_planning = False
            culprit, when = self.requests.planning_group, "when it was planned"
            with self._accounting:
                if culprit is None:
                    raise error
                self.requests.revert()
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

    def abort_request(self, request_id: str | Iterable[str]) -> RequestOutput | None:
        """End a request now and free its blocks. Returns its last output; None if it is unknown or has been returned
        to its end already. Several ids, as vLLM takes them, end several requests; this returns None."""
        if not isinstance(request_id, str):
            for each in request_id:
                self.abort_request(each)
            return None
        with interrupt_deferred():
            unreturned = {output.request_id: output for output in self._outputs}.get(request_id)
            self._outputs = [output for output in self._outputs if output.request_id != request_id]
            if (group := self._groups.get(request_id)) is None:
                return unreturned
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

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, except pinned ones. Returns False, and does nothing, while requests run, unless
        `reset_running_requests`: then these, and those in the host tier, compute their tokens so far again."""
        if self.has_unfinished_requests() and not reset_running_requests:
            return False
        with interrupt_deferred():
            self._revert_in_flight()
            for group in list(self.requests.running):
                self.scheduler.preemptor.preempt(group, may_swap=False)
            for group in list(self.requests.swapped):
                self.requests.reset_swapped(group)
            self.blocks.forget_cached()
        return True

    def sleep(self, level: int = 1) -> None:
        """Give back weights and KV cache with all prefixes until `wake_up`. All `level`s are the same. Raises
        RequestError while requests run."""
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

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Load all again after `sleep`, whatever `tags` are given. Does nothing in an engine that is awake. Raises what
        loading raises."""
        if self.is_sleeping():
            self.executor = make_executor(self.plan.config, self.plan.kv_cache)
            self._slots.clear(self.executor)
            self._in_flight = StepsInFlight(self.requests, self.executor)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, be it to report that it was interrupted."""
        return bool(self._groups or self._outputs or self._is_stepping)

    def get_num_unfinished_requests(self) -> int:
        """The number of requests that have been added and not been returned to their end."""
        return len(self._groups)

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use another tokenizer. Raises RequestError while requests run, TokenizerError if it has too many tokens."""
        if self.has_unfinished_requests():
            raise RequestError("the tokenizer cannot be replaced while requests run: wait for them, or abort them")
        if tokenizer.vocab_size > (known := self.model_config.vocab_size):
            raise TokenizerError(f"{tokenizer.source} has {tokenizer.vocab_size} tokens, and the model {known}")
        self._use_tokenizer(tokenizer)

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
