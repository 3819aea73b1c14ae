"""The life of a request inside the engine. No torch here."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, get_args

import numpy as np

from quire.common.batch import DrawnRows
from quire.common.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from quire.kv.content_hash import NO_KEY, ContentKey

if TYPE_CHECKING:
    from quire.common.batch import Draw, TokenIds, TokenLogprobs
    from quire.common.params import SamplingParams
    from quire.engine.requests.beam_search import BeamSelector
    from quire.engine.requests.logprobs import LogprobRows, PromptScores
    from quire.runner.sampling.named_processor import NamedProcessor
    from quire.text.grammar.state import GrammarState
    from quire.text.tokenizer.detokenizer import IncrementalDetokenizer


class SequenceStatus(Enum):
    """Where a sequence stands; the finished ones are final."""

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
        """as outputs name it; None while unfinished"""
        self.is_finished = self.finish_reason is not None
        """no more tokens will come"""


class SequenceStage(Enum):
    """PREFILL until the keys and values of all its tokens but the newest are computed, then DECODE."""

    PREFILL = "prefill"
    DECODE = "decode"


class Sequence:
    """One stream of tokens: the prompt and the output so far.

    `token_ids` and `num_computed_tokens` advance in commit; the scheduler sets `status` as it moves the sequence
    between its queues, and resets `num_computed_tokens` when it takes the blocks away.
    """

    __slots__ = (
        "_history",
        "_num_known",
        "beam_candidates",
        "detokenizer",
        "drafts",
        "drawn_rows",
        "draws",
        "grammar",
        "has_told_end",
        "index",
        "logprobs",
        "needs_history",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_served_tokens",
        "num_told",
        "scores",
        "seq_id",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        draws: tuple[Draw, ...],
        detokenizer: IncrementalDetokenizer | None = None,
        logprobs: LogprobRows | None = None,
        scores: PromptScores | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.index = draws[0].index if draws else 0
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_served_tokens = 0
        """the most that were ever computed: its tenant's account"""
        self.status = SequenceStatus.WAITING
        self.stop_reason: int | str | None = None
        self.draw_with(draws)
        self.drafts: tuple[int, ...] = ()
        """Tokens that are proposed to come next. The next step verifies as many as it has room for."""
        self._history: TokenIds | None = None
        self._num_known = 0
        """Number of tokens that `_history` holds already."""
        self.detokenizer = detokenizer
        self.logprobs = logprobs
        """of its output tokens, where they are wanted"""
        self.scores = scores
        """of its prompt tokens, where they are wanted"""
        self.grammar: GrammarState | None = None
        """what its tokens have to be; None: anything"""
        self.num_told = (0, 0)
        """output tokens, and characters of text, that deltas have brought"""
        self.has_told_end = False
        """a delta has brought the finish reason"""
        self.beam_candidates: TokenLogprobs | None = None
        """What may follow a beam, while other beams of its request have yet to be computed."""

    def draw_with(self, draws: tuple[Draw, ...]) -> None:
        """Set how the next token is drawn: with several draws while the sequence stands for all samples of a prompt,
        with none if it is only scored."""
        self.draws = draws
        self.needs_history = any(draw.needs_history for draw in draws)
        self.drawn_rows = DrawnRows(draws, self.num_prompt_tokens) if draws else None
        """What the scheduler asks of the sequence's last row where that depends on no other tokens."""

    def fork(self, seq_id: int, draw: Draw) -> Sequence:
        """A sequence that has the same past and goes on with a draw of its own."""
        detokenizer = None if self.detokenizer is None else self.detokenizer.fork()
        logprobs = None if self.logprobs is None else self.logprobs.fork()
        other = Sequence(seq_id, self.token_ids, (), detokenizer, logprobs)
        other.index, other.num_prompt_tokens = draw.index, self.num_prompt_tokens
        other.draw_with((draw,))
        other.num_computed_tokens = self.num_computed_tokens
        other.num_served_tokens = self.num_served_tokens
        other.status = self.status
        other.grammar = None if self.grammar is None else self.grammar.fork()
        return other

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
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """What is left to run before the next token can be drawn."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def stage(self) -> SequenceStage:
        """Whether it is still catching up with its own tokens."""
        return SequenceStage.DECODE if self.num_uncomputed_tokens == 1 else SequenceStage.PREFILL

    def to_output(self, *, delta: bool = False) -> CompletionOutput:
        """What the caller sees of it now: all, or what is new since `delta` was last asked for."""
        text = "" if self.detokenizer is None else self.detokenizer.stable_text(self.status.is_finished)
        num_tokens, num_chars = self.num_told if delta else (0, 0)
        if delta:
            self.num_told = self.num_output_tokens, len(text)
            self.has_told_end = self.status.is_finished
        return CompletionOutput(
            index=self.index,
            text=text[num_chars:],
            token_ids=self.token_ids[self.num_prompt_tokens + num_tokens :],
            finish_reason=self.status.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if self.logprobs is None else self.logprobs.total,
            logprobs=None if self.logprobs is None else self.logprobs.to_dicts(num_tokens),
        )


class SequenceGroup:
    """A request inside the engine: the sequences that grow out of one prompt."""

    __slots__ = (
        "content_key",
        "error",
        "has_told_prompt",
        "metrics",
        "num_cached_tokens",
        "order",
        "params",
        "processors",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "scores",
        "search",
        "seqs",
        "stop_token_ids",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        seq: Sequence,
        params: SamplingParams,
        arrival_time: float,
        content_key: ContentKey = NO_KEY,
        search: BeamSelector | None = None,
        processors: tuple[NamedProcessor, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.seqs = [seq]
        self.order = seq.seq_id
        """its place by arrival: sequence ids are given out one after another"""
        self.params = params
        self.tenant = params.tenant
        self.content_key = content_key
        self.search = search
        """Decides how its sequences continue, if they are beams."""
        self.processors = processors
        """The logits processors that its draws name. They can be looked up for as long as this object lives."""
        self.prompt_token_ids = list(seq.token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.scores = seq.scores
        self.has_told_prompt = False
        """a delta has brought the prompt's log-probabilities"""
        self.metrics = RequestMetrics(arrival_time)
        self.num_cached_tokens = 0
        self.error: str | None = None

    def resume(self, output_token_ids: list[int], metrics: RequestMetrics, num_cached_tokens: int) -> None:
        """Go on, before anything is computed, behind what another engine has told: as after a preemption, the tokens so
        far are computed again. Several samples have none and begin again, with the same seeds."""
        (seq,) = self.seqs
        seq.token_ids += output_token_ids
        seq.num_told = len(output_token_ids), 0
        self.metrics, self.num_cached_tokens = metrics, num_cached_tokens
        if output_token_ids:  # the prompt's log-probabilities have been told
            seq.scores = self.scores = None

    @property
    def unfinished_seqs(self) -> list[Sequence]:
        """Those that still want tokens."""
        return [seq for seq in self.seqs if not seq.status.is_finished]

    def seqs_in(self, status: SequenceStatus) -> list[Sequence]:
        """Those of one status."""
        return [seq for seq in self.seqs if seq.status is status]

    @property
    def num_wanted_seqs(self) -> int:
        """Sequences it runs with, now or once its prompt is computed."""
        return sum(len(seq.draws) or 1 for seq in self.unfinished_seqs)

    @property
    def is_finished(self) -> bool:
        """All its sequences are."""
        return all(seq.status.is_finished for seq in self.seqs)

    @property
    def has_failed(self) -> bool:
        """It ended because something failed in its own work; `error` says so."""
        return self.error is not None and any(seq.status is SequenceStatus.FINISHED_ABORTED for seq in self.seqs)

    def to_failed_output(self) -> RequestOutput:
        """What the caller is told where the rest cannot be made: the error."""
        outputs = [CompletionOutput(seq.index, "", [], seq.status.finish_reason) for seq in self.seqs]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, True, error=self.error)

    def to_output(self) -> RequestOutput | None:
        """What the caller is told after a step that changed it: of the kind that was asked for; None is nothing."""
        kind, finished = self.params.output_kind, self.is_finished
        if (kind == "final_only" or self.params.ranks_samples) and not finished:
            return None
        is_delta = kind == "delta"
        prompt_logprobs = None
        if self.scores is not None and not (is_delta and self.has_told_prompt):
            prompt_logprobs, self.has_told_prompt = self.scores.to_dicts(), True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._outputs(is_delta) if self.search is None else self.search.outputs(self.seqs),
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            prompt_logprobs=prompt_logprobs,
        )

    def _outputs(self, is_delta: bool) -> list[CompletionOutput]:
        if self.params.ranks_samples:
            return self._best()
        return [seq.to_output(delta=is_delta) for seq in self.seqs if not (is_delta and seq.has_told_end)]

    def _best(self) -> list[CompletionOutput]:
        """The `n` likeliest samples, best first, numbered in this order."""
        outputs = sorted((seq.to_output() for seq in self.seqs), key=lambda output: -(output.cumulative_logprob or 0.0))
        for place, output in enumerate(outputs):
            output.index = place
        return outputs[: self.params.n]
