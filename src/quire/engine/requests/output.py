"""The output side of a request: what its samples have produced, and what of it the caller receives.

The engine has these objects for each request, and the API process has its own, which follow the engine's token by
token. They know nothing of blocks, queues or steps. This module does not import torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from quire.common.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from quire.common.lora import KnownAdapter, LoRARequest
    from quire.common.params import SamplingParams
    from quire.engine.requests.logprobs import LogprobRows, PromptScores
    from quire.engine.requests.pooling import PromptPooling
    from quire.text.tokenizer.detokenizer import IncrementalDetokenizer


class SampleOutput(msgspec.Struct, eq=False):
    """The output of one sample: its tokens, their text and log-probabilities, and how it ended."""

    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence tokens; none with ignore_eos."""
    detokenizer: IncrementalDetokenizer | None = None
    """None where no text is wanted."""
    logprobs: LogprobRows | None = None
    """One row for each of the tokens; None where no log-probabilities are wanted."""
    index: int = 0
    """Place of the sample in its request."""
    token_ids: list[int] = []
    accepted_drafts: list[int] = []
    """Places of the tokens that were drafts, ascending."""
    predicted_drafts: list[int] = []
    """Places of those drafts that are from the request's prediction."""
    finish_reason: FinishReason | None = None
    """None while more tokens may come."""
    stop_reason: int | str | None = None
    num_emitted: tuple[int, int] = (0, 0)
    """Number of tokens, and of characters of text, that deltas have contained."""
    has_emitted_end: bool = False
    """A delta has contained the finish reason."""
    _end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.params.ignore_eos:
            self.eos_token_ids = frozenset()
        self._end_token_ids = self.eos_token_ids.union(self.params.stop_token_ids or ())

    def append(self, token_id: int) -> bool:
        """Append a token and, unless it is a stop token, its text. Returns whether the sample ends with it, because it
        is a stop token or completes a stop string."""
        self.token_ids.append(token_id)
        is_stop = token_id in self._end_token_ids and len(self.token_ids) > self.params.min_tokens
        matched = None
        if self.detokenizer is not None and (not is_stop or self.params.include_stop_str_in_output):
            matched = self.detokenizer.append(token_id)
        if not is_stop and matched is None:
            return False
        self.finish_reason = "stop"
        self.stop_reason = matched if not is_stop else None if token_id in self.eos_token_ids else token_id
        return True

    def fork(self, index: int) -> SampleOutput:
        """Return a sample with the same output so far, of which nothing has been emitted, that continues by itself."""
        detokenizer = None if self.detokenizer is None else self.detokenizer.fork()
        logprobs = None if self.logprobs is None else self.logprobs.fork()
        other = SampleOutput(self.params, self.eos_token_ids, detokenizer, logprobs, index)
        other.token_ids += self.token_ids
        other.accepted_drafts += self.accepted_drafts
        other.predicted_drafts += self.predicted_drafts
        return other

    def to_completion(self, *, delta: bool = False) -> CompletionOutput:
        """Return the whole output so far, or with `delta` what is new since the last delta."""
        is_finished = self.finish_reason is not None
        text = "" if self.detokenizer is None else self.detokenizer.stable_text(is_finished)
        num_tokens, num_chars = self.num_emitted if delta else (0, 0)
        if delta:
            self.num_emitted, self.has_emitted_end = (len(self.token_ids), len(text)), is_finished
        return CompletionOutput(
            index=self.index,
            text=text[num_chars:],
            token_ids=self.token_ids[num_tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if self.logprobs is None else self.logprobs.total,
            logprobs=None if self.logprobs is None else self.logprobs.to_dicts(num_tokens),
            accepted_drafts=places_from(self.accepted_drafts, num_tokens),
            predicted_drafts=places_from(self.predicted_drafts, num_tokens),
        )


@dataclass(slots=True, eq=False)
class OutputBuilder:
    """Makes the outputs of one request for its caller from those of its samples. Holds what the samples share."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: InitVar[float]
    prompt: str | None = None
    scores: PromptScores | None = None
    """Log-probabilities of prompt tokens, where they are wanted."""
    pooling: PromptPooling | None = None
    """What is made of the prompt's hidden states, where that is wanted."""
    num_cached_tokens: int = 0
    error: str | None = None
    adapter: InitVar[KnownAdapter | None] = None
    has_emitted_prompt: bool = False
    """A delta has contained the prompt's log-probabilities."""
    metrics: RequestMetrics = field(init=False)
    lora_request: LoRARequest | None = field(init=False)
    emits_only_end: bool = field(init=False)
    """The caller receives one output, once all samples have finished."""

    def __post_init__(self, arrival_time: float, adapter: KnownAdapter | None) -> None:
        self.metrics = RequestMetrics(arrival_time)
        self.lora_request = None if adapter is None else adapter.request
        self.emits_only_end = self.params.output_kind == "final_only" or self.params.ranks_samples

    def to_output(
        self, samples: list[SampleOutput], completions: list[CompletionOutput] | None = None
    ) -> RequestOutput:
        """Return an output of the kind that the parameters ask for. The `completions`, a beam search's, replace those
        of the samples."""
        is_delta = self.params.output_kind == "delta"
        if completions is None and self.params.ranks_samples:
            completions = self._best(samples)
        elif completions is None:
            completions = [s.to_completion(delta=is_delta) for s in samples if not (is_delta and s.has_emitted_end)]
        output = self._output(completions, None not in [sample.finish_reason for sample in samples])
        output.num_cached_tokens, output.metrics = self.num_cached_tokens, self.metrics
        if self.scores is not None and not (is_delta and self.has_emitted_prompt):
            output.prompt_logprobs, self.has_emitted_prompt = self.scores.to_dicts(), True
        if self.pooling is not None:
            output.pooled = self.pooling.result
        return output

    def to_failed_output(self, samples: list[SampleOutput]) -> RequestOutput:
        """Return the last output of a request of which only the error can be returned."""
        return self._output([CompletionOutput(sample.index, "", [], sample.finish_reason) for sample in samples], True)

    def _output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            finished,
            error=self.error,
            lora_request=self.lora_request,
        )

    def _best(self, samples: list[SampleOutput]) -> list[CompletionOutput]:
        """The `n` likeliest samples, best first, numbered in this order."""
        outputs = [sample.to_completion() for sample in samples]
        outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        for place, output in enumerate(outputs):
            output.index = place
        return outputs[: self.params.n]


def places_from(places: list[int], start: int) -> list[int]:
    """Return the places from `start` on, counted from there. The places are ascending."""
    return [place - start for place in places[bisect_left(places, start) :]] if places else []


def text_of(detokenizer: IncrementalDetokenizer | None, token_ids: Iterable[int]) -> str:
    """Return the text that these tokens would add; `detokenizer` does not change, and None makes no text."""
    if detokenizer is None:
        return ""
    detokenizer = detokenizer.fork()
    for token_id in token_ids:
        detokenizer.append(token_id)
    return detokenizer.text
