"""A request inside the engine, and its sequences. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum
from typing import TYPE_CHECKING, get_args

import numpy as np

from quire.common.batch import DrawnRows
from quire.common.outputs import FinishReason
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey

if TYPE_CHECKING:
    from quire.common.batch import Draw, TokenIds, TokenLogprobs
    from quire.common.lora import KnownAdapter
    from quire.common.outputs import RequestMetrics, RequestOutput
    from quire.engine.drafting.trust import SequenceDrafts
    from quire.engine.requests.beam_search import BeamSelector
    from quire.engine.requests.logprobs import PromptScores
    from quire.engine.requests.output import OutputBuilder, SampleOutput
    from quire.engine.requests.pooling import PromptPooling
    from quire.runner.sampling.named_processor import NamedProcessor
    from quire.text.grammar.state import GrammarState


class SequenceStatus(Enum):
    """Where a sequence is. The FINISHED ones are final."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"

    def __init__(self, label: str) -> None:
        # Attributes, since they are read for every sequence in every step.
        self.finish_reason: FinishReason | None = next((r for r in get_args(FinishReason) if r == label), None)
        """The name that outputs use; None while unfinished."""
        self.is_finished = self.finish_reason is not None
        """Whether no more tokens will come."""


class Sequence:
    """One stream of tokens: the prompt and the output so far.

    `token_ids`, `output` and `num_computed_tokens` advance in commit; the scheduler sets `status` as it moves the
    sequence between its queues, and resets `num_computed_tokens` when it takes the blocks away.
    """

    __slots__ = (
        "_history",
        "_num_known",
        "beam_candidates",
        "drafting",
        "drawn_rows",
        "draws",
        "grammar",
        "is_whole",
        "needs_history",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_samples",
        "num_served_tokens",
        "output",
        "pooling",
        "scores",
        "seq_id",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        draws: tuple[Draw, ...],
        output: SampleOutput,
        scores: PromptScores | None = None,
        pooling: PromptPooling | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        """The prompt's tokens, followed by those of `output`."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_served_tokens = 0
        """The most tokens that were ever computed, for which its tenant has been charged."""
        self.status = SequenceStatus.WAITING
        self.output = output
        self.draw_with(draws)
        self.drafting: SequenceDrafts | None = None
        """What is known about drafts of its next tokens; None before the first."""
        self._history: TokenIds | None = None
        self._num_known = 0
        """Number of tokens that `_history` holds already."""
        self.scores = scores
        """Log-probabilities of its prompt tokens, where they are wanted."""
        self.pooling = pooling
        """What is made of its hidden states, where that is wanted."""
        self.is_whole = pooling is not None and pooling.is_whole
        """Whether all its tokens must run in the same step."""
        self.grammar: GrammarState | None = None
        """The grammar that its tokens must follow; None for any tokens."""
        self.beam_candidates: TokenLogprobs | None = None
        """What may follow a beam, while other beams of its request have yet to be computed."""

    def draw_with(self, draws: tuple[Draw, ...]) -> None:
        """Set how the next token is drawn: with several draws while the sequence stands for all samples of a prompt,
        with none if it is only scored."""
        self.draws = draws
        self.num_samples = len(draws) or 1
        """The sequences that it is, or will be once its prompt is computed."""
        self.needs_history = bool(draws) and any(draw.needs_history for draw in draws)
        self.drawn_rows = DrawnRows(draws, self.num_prompt_tokens) if draws else None
        """What the scheduler asks of the sequence's last row where that depends on no other tokens."""

    def fork(self, seq_id: int, draw: Draw) -> Sequence:
        """Return a sequence with the same history that continues with another draw."""
        other = Sequence(seq_id, self.token_ids, (), self.output.fork(draw.index))
        other.num_prompt_tokens = self.num_prompt_tokens
        other.draw_with((draw,))
        other.num_computed_tokens = self.num_computed_tokens
        other.num_served_tokens = self.num_served_tokens
        other.status = self.status
        other.grammar = None if self.grammar is None else self.grammar.fork()
        return other

    def extend(self, token_ids: SequenceOf[int]) -> None:
        """Append tokens without looking for stop tokens or stop strings."""
        self.token_ids += token_ids
        self.output.token_ids += token_ids

    def finish(self, status: SequenceStatus) -> None:
        """End the sequence with one of the finished statuses."""
        self.status = status
        self.output.finish_reason = status.finish_reason

    def history(self) -> TokenIds:
        """[num_tokens]: all its tokens, a view of memory that grows by doubling."""
        num_tokens, num_known = len(self.token_ids), self._num_known
        if self._history is None or len(self._history) < num_tokens:
            known, self._history = self._history, np.empty(2 * num_tokens, np.int32)
            if known is not None:
                self._history[:num_known] = known[:num_known]
        self._history[num_known:num_tokens] = self.token_ids[num_known:]
        self._num_known = num_tokens
        return self._history[:num_tokens]

    @property
    def max_cached_tokens(self) -> int | None:
        """The most tokens that may come from the prefix cache, since the rows of those behind them are wanted; None:
        any number."""
        wanted = self.scores or self.pooling
        return None if wanted is None else wanted.max_cached_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self.output.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens to run before the next one can be drawn."""
        return len(self.token_ids) - self.num_computed_tokens


class SequenceGroup:
    """A request inside the engine: the sequences that continue one prompt."""

    __slots__ = (
        "adapter",
        "content_key",
        "metrics",
        "order",
        "outputs",
        "params",
        "prediction",
        "processors",
        "request_id",
        "search",
        "seqs",
        "tenant",
    )

    def __init__(
        self,
        outputs: OutputBuilder,
        seq: Sequence,
        content_key: ContentKey = NO_KEY,
        search: BeamSelector | None = None,
        processors: tuple[NamedProcessor, ...] = (),
        adapter: KnownAdapter | None = None,
    ) -> None:
        self.outputs = outputs
        self.request_id = outputs.request_id
        self.params = outputs.params
        self.metrics = outputs.metrics
        self.seqs = [seq]
        self.order = seq.seq_id
        """The request's place by arrival, since sequence ids ascend."""
        self.tenant = outputs.params.tenant
        self.content_key = content_key
        self.search = search
        """Decides how its sequences continue, if they are beams."""
        self.processors = processors
        """The logits processors that its draws name. They can be looked up for as long as this object lives."""
        self.prediction: TokenIds | None = None
        """Tokens that the caller expects in the output, from which drafts are made."""
        self.adapter = adapter
        """The LoRA adapter whose weights are added to the model's for it; None for the model alone."""

    def resume(self, output_token_ids: list[int], metrics: RequestMetrics, num_cached_tokens: int) -> None:
        """Continue, before anything is computed, what another engine has begun: as after a preemption, the tokens so
        far are computed again. Several samples have none and begin again, with the same seeds."""
        (seq,), outputs = self.seqs, self.outputs
        seq.extend(output_token_ids)
        seq.output.num_emitted = len(output_token_ids), 0
        self.metrics = outputs.metrics = metrics
        outputs.num_cached_tokens = num_cached_tokens
        if output_token_ids:  # the prompt's log-probabilities have been emitted
            seq.scores = outputs.scores = None

    @property
    def error(self) -> str | None:
        """Why the request ended early, if it did."""
        return self.outputs.error

    @error.setter
    def error(self, error: str | None) -> None:
        self.outputs.error = error

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens whose keys and values came from the prefix cache."""
        return self.outputs.num_cached_tokens

    @property
    def unfinished_seqs(self) -> list[Sequence]:
        """The sequences that have not finished."""
        return [seq for seq in self.seqs if not seq.status.is_finished]

    def seqs_in(self, status: SequenceStatus) -> list[Sequence]:
        """The sequences with this status."""
        return [seq for seq in self.seqs if seq.status is status]

    @property
    def num_wanted_seqs(self) -> int:
        """The number of sequences that it runs with, now or once its prompt is computed."""
        num_seqs = 0
        for seq in self.seqs:  # a loop, as in `is_finished`: each step asks several times
            if not seq.status.is_finished:
                num_seqs += seq.num_samples
        return num_seqs

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences have finished."""
        for seq in self.seqs:  # noqa: SIM110
            if not seq.status.is_finished:
                return False
        return True

    @property
    def has_failed(self) -> bool:
        """Whether it ended because its own work failed; `error` gives the reason."""
        return self.error is not None and any(seq.status is SequenceStatus.FINISHED_ABORTED for seq in self.seqs)

    def to_output(self) -> RequestOutput | None:
        """Return what the caller receives after a step that changed the request; None if nothing is due yet."""
        if self.outputs.emits_only_end and not self.is_finished:
            return None
        completions = None if self.search is None else self.search.outputs(self.seqs)
        return self.outputs.to_output([seq.output for seq in self.seqs], completions)

    def to_failed_output(self) -> RequestOutput:
        """Return the last output of a request of which only the error can be returned."""
        return self.outputs.to_failed_output([seq.output for seq in self.seqs])
