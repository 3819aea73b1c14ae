"""Turns the engine's messages into outputs: text, stop strings, log-probabilities, samples ranked by likelihood.

Each request has a SequenceGroup in this process too, which follows the engine's group token by token, so that callers
get the same outputs as from the engine itself.
"""

from __future__ import annotations

import asyncio
import time

from msgspec.structs import replace

from quire.common.batch import TokenLogprobs
from quire.common.errors import EngineDeadError, QuireError, failures_named
from quire.common.outputs import CompletionOutput, RequestOutput
from quire.config.model import ModelConfig
from quire.engine.process.messages import AddRequest, AddScoring, Progress, RequestDelta, SequenceDelta
from quire.engine.requests.beam_search import BeamSearch
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.step.commit import append_token

_LOGPROB_ROWS_AT_ONCE = 64
"""Rows converted at once; with 20 log-probabilities each, this takes a millisecond or two."""


class RequestState:
    """One running request: turns the engine's deltas into outputs.

    Deltas that the caller has not fetched are merged into one output, so a slow caller costs only the memory of its
    tokens, which max_model_len bounds.
    """

    def __init__(self, message: AddRequest | AddScoring, group: SequenceGroup, model: ModelConfig) -> None:
        """Takes ownership of `group`, made by InputProcessor; `message` is what the engine received for it."""
        self.message = message
        self.group = group
        self.num_deaths = 0
        """Number of engines that died while they ran this request."""
        self._repeated: dict[int, list[int]] = {}
        """For each sample by index, the emitted tokens that an engine generating it again has not yet repeated."""
        self._eos_token_ids = model.eos_token_ids
        self._search = group.search if isinstance(group.search, BeamSearch) else None
        group.search = None  # the engine runs the search; here it is used only to make text
        self._beams: list[CompletionOutput] | None = None
        self._changed = asyncio.Event()
        self._failure: QuireError | None = None
        self.is_finished = False
        """Whether the request has ended."""

    @property
    def finish_reason(self) -> str:
        """Why the first output ended: stop, length, abort or error."""
        reason = self._beams[0].finish_reason if self._beams else self.group.seqs[0].status.finish_reason
        failed = self._failure is not None or self.group.error is not None
        return "error" if failed or reason is None else reason

    async def next_output(self) -> RequestOutput:
        """Wait for new tokens or the end, and return the next output. Raises the error if the request has failed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            try:
                with failures_named(self.group.request_id, "when its output was made"):
                    await self._make_logprobs()
                    output = self.group.to_output()
            except QuireError as error:
                self.fail(error)
                raise
            if output is not None:
                if self._beams is not None:
                    output.outputs = self._beams
                return output

    async def _make_logprobs(self) -> None:
        """Convert log-probabilities a few rows at a time, and let other requests run in between."""
        scores = self.group.scores
        owners = (scores and scores.rows, *(seq.logprobs for seq in self.group.seqs))
        for rows in owners:
            while rows and rows.make(_LOGPROB_ROWS_AT_ONCE):
                await asyncio.sleep(0)

    def update(self, delta: RequestDelta) -> int:
        """Apply a delta of the engine. Returns the number of new tokens, without those after a stop string."""
        group = self.group
        group.num_cached_tokens, group.error = delta.num_cached_tokens, delta.error
        group.metrics = delta.metrics or group.metrics
        if delta.prompt_logprobs is not None and group.scores is not None and not group.scores.is_done:
            group.scores.rows.extend(delta.prompt_logprobs.unpack())
        if self._search is not None:
            self._beams = [_beam_output(self._search, beam) for beam in delta.sequences]
            num_tokens = sum(len(beam.token_ids) for beam in delta.sequences)
        else:
            if len(group.seqs[0].draws) > 1 and any(sequence.token_ids for sequence in delta.sequences):
                self._fork_samples()
            num_tokens = sum([self._extend(group.seqs[sequence.index], sequence) for sequence in delta.sequences])
        if delta.finished:
            self._finish(SequenceStatus.FINISHED_ABORTED if delta.error else SequenceStatus.FINISHED_STOPPED)
        self.is_finished = group.is_finished
        if self.is_finished and group.metrics.finished_time is None:  # by a stop string, found here only
            group.metrics.finished_time = time.monotonic()
        if self.is_finished or (num_tokens and group.params.output_kind != "final_only"):
            self._changed.set()
        return num_tokens

    def replay(self) -> AddRequest | AddScoring:
        """Return the message with which another engine continues this request.

        A single sample continues after its last token. Several samples start again from the prompt, and so do beam
        searches and scores, which have emitted nothing yet.
        """
        if isinstance(self.message, AddScoring):
            return self.message
        group, progress = self.group, Progress(self.group.metrics, self.group.num_cached_tokens)
        outputs = {seq.index: seq.token_ids[seq.num_prompt_tokens :] for seq in group.seqs}
        if group.params.num_samples == 1:
            progress.token_ids = outputs[0]
        else:
            self._repeated = outputs
        return replace(self.message, progress=progress)

    def abort(self) -> None:
        """End the request; the tokens so far are its last output."""
        self._finish(SequenceStatus.FINISHED_ABORTED)
        self.group.metrics.finished_time = time.monotonic()
        self._changed.set()

    def fail(self, error: QuireError) -> None:
        """End the request with an error, which `next_output` raises."""
        self._failure, self.is_finished = error, True
        self._changed.set()

    def _finish(self, status: SequenceStatus) -> None:
        """Give the sequences that have not ended this status."""
        for seq in self.group.unfinished_seqs:
            seq.status = status
        self.is_finished = True

    def _fork_samples(self) -> None:
        """Fork the first sequence into all samples, as commit does in the engine once the prompt is computed."""
        group = self.group
        first, *others = group.seqs[0].draws
        group.seqs += [group.seqs[0].fork(place, draw) for place, draw in enumerate(others, start=1)]
        group.seqs[0].draw_with((first,))

    def _extend(self, seq: Sequence, delta: SequenceDelta) -> int:
        if seq.status.is_finished:
            return 0
        rows = None if delta.logprobs is None else delta.logprobs.unpack()
        num_repeated = self._num_repeated(delta)
        for place, token_id in enumerate(delta.token_ids[num_repeated:], start=num_repeated):
            if rows is not None and seq.logprobs is not None:
                seq.logprobs.extend(_row(rows, place))
            status = append_token(self.group, seq, token_id, self._eos_token_ids)
            if status is not None:
                seq.status = status
                return place + 1 - num_repeated
        if delta.finish_reason is not None:
            seq.status, seq.stop_reason = SequenceStatus(delta.finish_reason), delta.stop_reason
        return len(delta.token_ids) - num_repeated

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


def _row(rows: TokenLogprobs, place: int) -> TokenLogprobs:
    one = slice(place, place + 1)
    return TokenLogprobs(rows.token_ids[one], rows.logprobs[one], rows.ranks[one])


def _beam_output(search: BeamSearch, beam: SequenceDelta) -> CompletionOutput:
    return CompletionOutput(
        beam.index,
        search.text(beam.token_ids),
        beam.token_ids,
        beam.finish_reason,
        beam.stop_reason,
        beam.cumulative_logprob,
    )
