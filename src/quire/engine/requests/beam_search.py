"""Beam search: the likeliest outputs of a request are searched for side by side. This module does not import torch.

The beams of a request are its sequences. Each keeps the candidates for its next token until all beams have theirs; then
the search chooses among the candidates of all, and a beam continues, is forked, or ends. A beam with candidates has no
token to compute, so the scheduler does not run it: the beams need not run in the same step. No prefix is computed
twice, unless a beam was preempted.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace

from quire.common.errors import InvalidParamsError
from quire.common.outputs import CompletionOutput, FinishReason
from quire.engine.requests.output import text_of

if TYPE_CHECKING:
    from quire.common.params import BeamSearchParams
    from quire.config.model import ModelConfig
    from quire.engine.requests.sequence import Sequence


class BeamSelector(Protocol):
    """Decides how the beams of one request continue. Commit alone calls `select`, which changes it."""

    def select(self, beams: list[Sequence]) -> list[tuple[int, int]]:
        """Return the next beams, from the candidates of these: (index of parent, next token). Empty: the end."""
        ...

    def outputs(self, beams: list[Sequence]) -> list[CompletionOutput]:
        """Return the outputs for the caller at the end: those that the search has found, then the beams left."""
        ...


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """An output that has ended."""

    cum_logprob: float
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None = None
    score: float = 0.0
    """The sum of its log-probabilities, divided by length ** length_penalty. Not set for a beam that is cut short."""


class BeamSearch:
    """The search of one request, as transformers defines it.

    Of all continuations of the beams by one token, the `num_candidates` likeliest are examined in order; of equally
    likely ones, that of the earlier beam and then the smaller token id comes first. Those that end an output compete
    with the outputs found before, if they are among the first `beam_width`; the first `beam_width` of the others are
    the next beams.
    """

    def __init__(self, params: BeamSearchParams, model: ModelConfig, max_num_seqs: int) -> None:
        """Raises InvalidParamsError for a search that this model or this engine cannot run."""
        width = params.beam_width
        self.params = params
        self.eos_token_ids = frozenset[int]() if params.ignore_eos else model.eos_token_ids
        self.end_token_ids = self.eos_token_ids.union(params.stop_token_ids or ())
        self.num_candidates = max(2, 1 + len(self.end_token_ids)) * width
        self.max_tokens = params.max_tokens
        if width > max_num_seqs:
            raise InvalidParamsError(
                f"beam_width={width}: this engine runs at most max_num_seqs={max_num_seqs} at once"
            )
        if params.structured_outputs is not None and not self.eos_token_ids:
            raise InvalidParamsError(
                "beam search with structured_outputs needs a checkpoint with an end-of-sequence token"
            )
        if self.num_candidates > model.vocab_size:
            raise InvalidParamsError(
                f"beam_width={width} with {len(self.end_token_ids)} end tokens compares {self.num_candidates} "
                f"candidates in a step, and this model has only {model.vocab_size} tokens: search less wide"
            )
        self._max_model_len = model.max_model_len
        self._cum_logprobs = [0.0]  # Of the beams, in their order.
        self._finished: list[_Hypothesis] = []  # The best `beam_width`, best first.

    def start(self, seq: Sequence) -> None:
        """Prepare a request's first sequence: set its draws, and take its detokenizer: text is made at the end."""
        self._detokenizer, seq.output.detokenizer = seq.output.detokenizer, None
        self.max_tokens = min(self.max_tokens, self._max_model_len - seq.num_tokens)
        temperature = self.params.temperature if self.params.temperature != 1 else 0.0
        draw = replace(
            seq.draws[0],
            temperature=temperature,
            logprobs=self.num_candidates,
            logprobs_mode="processed_logprobs",
        )
        seq.draw_with((draw,) * self.params.beam_width)

    def select(self, beams: list[Sequence]) -> list[tuple[int, int]]:
        """One step of the search. Empty once no beam can become one of the best, according to early_stopping."""
        held = [beam.beam_candidates for beam in beams if beam.beam_candidates is not None]
        token_ids = np.concatenate([candidates.token_ids[0, 1:] for candidates in held])
        cum_logprobs = np.concatenate(
            [
                candidates.logprobs[0, 1:].astype(np.float64) + cum_logprob
                for candidates, cum_logprob in zip(held, self._cum_logprobs, strict=True)
            ]
        )
        per_beam, length = len(token_ids) // len(beams), beams[0].num_output_tokens + 1
        order = np.argsort(-cum_logprobs, kind="stable")[: self.num_candidates]
        children: list[tuple[int, int]] = []
        self._cum_logprobs = []
        for rank, candidate in enumerate(order[np.isfinite(cum_logprobs[order])].tolist()):
            cum_logprob, token_id = float(cum_logprobs[candidate]), int(token_ids[candidate])
            reason = self._finish_reason(token_id, length)
            if reason is None and len(children) < self.params.beam_width:
                children.append((candidate // per_beam, token_id))
                self._cum_logprobs.append(cum_logprob)
            elif reason is not None and rank < self.params.beam_width:
                self._finish(beams[candidate // per_beam], token_id, cum_logprob, reason)
        if not children or self._is_over(length):
            self._cum_logprobs = []
        return children[: len(self._cum_logprobs)]

    def _finish_reason(self, token_id: int, length: int) -> FinishReason | None:
        if token_id in self.end_token_ids:
            return "stop"
        return "length" if length >= self.max_tokens else None

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / math.pow(max(1, length), self.params.length_penalty)

    def _finish(self, beam: Sequence, token_id: int, cum_logprob: float, reason: FinishReason) -> None:
        """Keep the output if it is among the best so far."""
        output = [*beam.output.token_ids, token_id]
        score = self._score(cum_logprob, len(output))
        is_stop = reason == "stop" and token_id not in self.eos_token_ids
        if reason == "stop" and not self.params.include_stop_str_in_output:
            output.pop()
        hypothesis = _Hypothesis(cum_logprob, output, reason, token_id if is_stop else None, score)
        insort(self._finished, hypothesis, key=lambda other: -other.score)
        del self._finished[self.params.beam_width :]

    def _is_over(self, length: int) -> bool:
        """Whether outputs that could still be found count as no better than those found already."""
        if len(self._finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens
        return self._score(self._cum_logprobs[0], length) <= self._finished[-1].score

    def outputs(self, beams: list[Sequence]) -> list[CompletionOutput]:
        """The `n` best. If the search was cut short, its unfinished beams follow the finished outputs."""
        hypotheses = self._finished + [
            _Hypothesis(cum_logprob, list(beam.output.token_ids), beam.output.finish_reason)
            for beam, cum_logprob in zip(beams, self._cum_logprobs, strict=False)
        ]
        num_returned = self.params.n or self.params.beam_width
        return [self._output(index, hypothesis) for index, hypothesis in enumerate(hypotheses[:num_returned])]

    def _output(self, index: int, hypothesis: _Hypothesis) -> CompletionOutput:
        text = text_of(self._detokenizer, hypothesis.token_ids)
        reasons = hypothesis.finish_reason, hypothesis.stop_reason
        return CompletionOutput(index, text, hypothesis.token_ids, *reasons, hypothesis.cum_logprob)
