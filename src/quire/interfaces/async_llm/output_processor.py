"""Turns the engine's messages into outputs: text, stop strings, log-probabilities, samples ranked by likelihood.

The outputs are made by the same classes as in the engine, so callers receive what the engine itself would return.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.common.batch import TokenLogprobs
from quire.common.errors import EngineDeadError, QuireError, RequestError, failures_named
from quire.common.outputs import CompletionOutput, FinishReason, RequestOutput
from quire.engine.process.messages import AddAny, AddRequest, Progress, RequestDelta, SequenceDelta
from quire.engine.requests.output import OutputBuilder, SampleOutput, text_of
from quire.engine.routing.router import Route
from quire.kv.prefix_cache.content_hash import BlockHash

if TYPE_CHECKING:
    from quire.interfaces.async_llm.request_table import RequestTable

_LOGPROB_ROWS_AT_ONCE = 64
"""Rows converted at once; with 20 log-probabilities each, this takes a millisecond or two."""


class RequestState:
    """One running request: turns the engine's deltas into outputs.

    Deltas that the caller has not fetched are merged into one output, so a slow caller costs only the memory of its
    tokens, which max_model_len bounds.
    """

    def __init__(
        self,
        message: AddAny,
        outputs: OutputBuilder,
        sample: SampleOutput,
        changed: asyncio.Event | None = None,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """`message` is the one that adds the request to an engine; `sample` is its first sample; `changed` is set when
        there is a new output."""
        self.message = message
        self.hashes = hashes
        """The hashes of the prompt's full blocks, if there are several engines to choose from."""
        self.table: RequestTable | None = None
        """The requests of the engine that runs it, or that it waits for; None when it has ended."""
        self.route: Route | None = None
        """What the router counts for it; None while no engine runs it."""
        self.outputs = outputs
        self.samples = [sample]
        self.num_deaths = 0
        """Number of engines that died, one after another, while they ran this request and it made little progress."""
        self._num_tokens_at_death = 0
        self._repeated: dict[int, list[int]] = {}
        """For each sample by index, the emitted tokens that an engine generating it again has not yet repeated."""
        self._is_beam_search = isinstance(message, AddRequest) and message.is_beam_search
        self._beams: list[CompletionOutput] | None = None
        self._changed = changed or asyncio.Event()
        self._failure: QuireError | None = None
        self.is_finished = False
        """Whether the request has ended."""

    @property
    def finish_reason(self) -> str:
        """Why the first output ended: stop, length, abort or error."""
        reason = self._beams[0].finish_reason if self._beams else self.samples[0].finish_reason
        failed = self._failure is not None or self.outputs.error is not None
        return "error" if failed or reason is None else reason

    @property
    def longest(self) -> int:
        """The number of tokens of the longest output so far."""
        return max(len(output.token_ids) for output in self._beams or self.samples)

    async def drain(self) -> None:
        """Wait until little is left to send to the request's engine."""
        if self.table is not None:
            await self.table.engine.drain()

    async def next_output(self) -> RequestOutput:
        """Wait for new tokens or the end, and return the next output. Raises the error if the request has failed."""
        await self._changed.wait()
        self._changed.clear()
        return await self.output()

    async def output(self) -> RequestOutput:
        """Return what there is now. Raises the error if the request has failed."""
        self.raise_failure()
        try:
            with failures_named(self.message.request_id, "when its output was made"):
                await self._make_logprobs()
                return self.outputs.to_output(self.samples, self._beams)
        except QuireError as error:
            self.fail(error)
            raise

    def raise_failure(self) -> None:
        """Raise the error if the request has failed. A pooling request has no output beside an error of the engine."""
        if self._failure is not None:
            raise self._failure
        if self.outputs.pooling is not None and self.outputs.error is not None:
            raise RequestError(self.outputs.error)

    async def _make_logprobs(self) -> None:
        """Convert log-probabilities a few rows at a time, and let other requests run in between."""
        scores = self.outputs.scores
        for rows in (scores and scores.rows, *(sample.logprobs for sample in self.samples)):
            while rows and rows.make(_LOGPROB_ROWS_AT_ONCE):
                await asyncio.sleep(0)

    def update(self, delta: RequestDelta) -> int:
        """Apply a delta of the engine. Returns the number of new tokens, without those after a stop string."""
        outputs, samples = self.outputs, self.samples
        outputs.num_cached_tokens, outputs.error = delta.num_cached_tokens, delta.error
        outputs.metrics = delta.metrics or outputs.metrics
        if delta.prompt_logprobs is not None and outputs.scores is not None and not outputs.scores.is_done:
            outputs.scores.rows.extend(delta.prompt_logprobs.unpack())
        if delta.pooled is not None and outputs.pooling is not None:
            outputs.pooling.result = delta.pooled.unpack()
        if self._is_beam_search:
            self._beams = [self._beam_output(beam) for beam in delta.sequences]
            num_tokens = sum(len(beam.token_ids) for beam in delta.sequences)
        else:
            # Before the prompt is computed there is one sample; the delta that follows has them all, in order.
            samples += [samples[0].fork(sequence.index) for sequence in delta.sequences[len(samples) :]]
            num_tokens = sum([self._extend(samples[sequence.index], sequence) for sequence in delta.sequences])
        if delta.finished:
            self._finish("abort" if delta.error else "stop")
        self.is_finished = all(sample.finish_reason is not None for sample in samples)
        if self.is_finished and outputs.metrics.finished_time is None:  # by a stop string, found here only
            outputs.metrics.finished_time = time.monotonic()
        if self.is_finished or (num_tokens and not outputs.emits_only_end):
            self._changed.set()
        return num_tokens

    def replay(self) -> AddAny:
        """Return the message with which another engine continues this request.

        A single sample continues after its last token. Several samples start again from the prompt, and so do beam
        searches, scores and pooling, which have emitted nothing yet.
        """
        if not isinstance(self.message, AddRequest):
            return self.message
        progress = Progress(self.outputs.metrics, self.outputs.num_cached_tokens)
        if self.outputs.params.num_samples == 1:
            progress.token_ids = list(self.samples[0].token_ids)
        else:
            progress.metrics = dataclasses.replace(self.outputs.metrics, drafts={})  # they are drafted again
            self._repeated = {sample.index: list(sample.token_ids) for sample in self.samples}
        return replace(self.message, progress=progress)

    def count_death(self, min_progress: int) -> None:
        """The engine has died. Earlier deaths no longer count if the request has got `min_progress` tokens since."""
        if self.num_deaths and self.longest - self._num_tokens_at_death >= min_progress:
            self.num_deaths = 0
        self.num_deaths += 1
        self._num_tokens_at_death = self.longest

    def abort(self) -> None:
        """End the request; the tokens so far are its last output."""
        self._finish("abort")
        self.outputs.metrics.finished_time = time.monotonic()
        self._changed.set()

    def fail(self, error: QuireError) -> None:
        """End the request with an error, which `next_output` raises."""
        self._failure, self.is_finished = error, True
        self._changed.set()

    def failed_output(self, error: QuireError) -> RequestOutput:
        """Return what there is of a request that has failed, with its error."""
        self._finish("abort")
        self.outputs.error = str(error)
        return self.outputs.to_output(self.samples, self._beams)

    def _finish(self, reason: FinishReason) -> None:
        """Give the samples that have not ended this finish reason."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or reason
        self.is_finished = True

    def _extend(self, sample: SampleOutput, delta: SequenceDelta) -> int:
        if sample.finish_reason is not None:
            return 0
        start = self._num_repeated(delta)
        token_ids, num_before = delta.token_ids[start:], len(sample.token_ids)
        counts = (count for count, token_id in enumerate(token_ids, start=1) if sample.append(token_id))
        num_tokens = next(counts, len(token_ids))  # up to the one that stops the sample
        taken = range(start, start + num_tokens)
        sample.accepted_drafts += [num_before + place - start for place in delta.accepted_drafts if place in taken]
        sample.predicted_drafts += [num_before + place - start for place in delta.predicted_drafts if place in taken]
        if sample.finish_reason is None and delta.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None and sample.logprobs is not None:
            rows, new = delta.logprobs.unpack(), slice(start, start + num_tokens)
            sample.logprobs.extend(TokenLogprobs(rows.token_ids[new], rows.logprobs[new], rows.ranks[new]))
        return num_tokens

    def _num_repeated(self, delta: SequenceDelta) -> int:
        """Return how many tokens of the delta repeat those emitted before an engine died.

        Raises EngineDeadError if the tokens differ from those emitted before.
        """
        repeated = self._repeated.get(delta.index)
        if not repeated:
            return 0
        count = min(len(repeated), len(delta.token_ids))
        if repeated[:count] != delta.token_ids[:count]:
            raise EngineDeadError("the new engine generated different tokens than the one that died")
        del repeated[:count]
        return count

    def _beam_output(self, beam: SequenceDelta) -> CompletionOutput:
        text = text_of(self.samples[0].detokenizer, beam.token_ids)
        reasons = beam.finish_reason, beam.stop_reason
        return CompletionOutput(beam.index, text, beam.token_ids, *reasons, beam.cumulative_logprob)
