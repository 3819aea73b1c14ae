"""Outputs of requests and sequences, and statistics of the engine. Attribute names are those of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from itertools import zip_longest
from operator import add
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from quire.common.lora import LoRARequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort", "ignored"]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """How likely a token was at its position. The garbage collector does not track these: there can be very many."""

    logprob: float
    """Natural logarithm of the probability; -inf for probability 0. EngineArgs.logprobs_mode selects the distribution.
    """
    rank: int | None = None
    """Rank among all tokens, from 1."""
    decoded_token: str | None = None
    """Text of this token alone; None without detokenize."""


@dataclass(slots=True)
class CompletionOutput:
    """The output of one sequence of a request so far."""

    index: int
    text: str
    """Text of the output. While the sequence runs, this is the part that no further token can change."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Why the sequence ended; None while it runs. With `ignored` the prompt was never run: see RequestOutput.error."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sequence; None for an end-of-sequence token."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all tokens; None unless they were requested or used to select samples."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`, log-probabilities by token id: first the token itself, then the likeliest tokens, in the
    number that was requested."""
    accepted_drafts: list[int] = field(default_factory=list, compare=False)
    """Places in `token_ids` of the tokens that were proposed before the model drew them. Which these are depends on the
    load; outputs that differ only in them are equal."""
    predicted_drafts: list[int] = field(default_factory=list, compare=False)
    """Those of `accepted_drafts` that the request's `prediction` had proposed."""

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of time.monotonic()."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By drafter, the number of drafts that were verified, and of those that were right."""

    def count_drafts(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Count drafts of this drafter."""
        num_before, num_accepted_before = self.drafts.get(drafter, (0, 0))
        self.drafts[drafter] = num_before + num_drafts, num_accepted_before + num_accepted

    @property
    def num_drafts(self) -> tuple[int, int]:
        """The numbers for all drafters together."""
        return sum(given for given, _ in self.drafts.values()), sum(right for _, right in self.drafts.values())


@dataclass(slots=True)
class RequestOutput:
    """The output of a request so far: cumulative, and final once `finished` is true."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Why the request failed; None if it did not."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities of each prompt token computed so far, if requested; None for the first token, which nothing
    predicts. With output_kind "delta", only the first output has them."""
    lora_request: LoRARequest | None = None
    """The LoRA adapter that it used."""
    pooled: npt.NDArray[np.float32] | None = None
    """What the model's pooler made of the prompt: [size], or [num_tokens, size]. None unless it was a pooling request
    that has succeeded."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The likelihood of a given continuation of a context: what `LLM.score_tokens` returns for each pair."""

    token_ids: list[int]
    """Tokens of the continuation."""
    logprobs: list[float]
    """Log-probability of each token, given all tokens before it."""
    ranks: list[int]
    """Rank of each token among all tokens, from 1."""
    num_cached_tokens: int
    """Tokens of the context whose keys and values came from the prefix cache."""

    @property
    def sum_logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> list[bool]:
        """For each token, whether greedy decoding would have chosen it."""
        return [rank == 1 for rank in self.ranks]


@dataclass(slots=True)
class AdapterStats:
    """The requests of a LoRA adapter: those that are unfinished, and the tokens of those that have ended."""

    num_waiting: int = 0
    """Requests that have not started."""
    num_running: int = 0
    """Requests that have started, also while they are preempted or swapped out."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    def __add__(self, other: AdapterStats) -> AdapterStats:
        return AdapterStats(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class DraftStats:
    """Drafts that were verified, of one drafter."""

    num_accepted_at: list[int]
    """How many were right, by position among the drafts of a sequence."""
    num_drafts: int = 0
    """How often drafts of a sequence were verified."""
    num_tokens: int = 0

    def __add__(self, other: DraftStats) -> DraftStats:
        accepted = [sum(pair) for pair in zip_longest(self.num_accepted_at, other.num_accepted_at, fillvalue=0)]
        return DraftStats(accepted, self.num_drafts + other.num_drafts, self.num_tokens + other.num_tokens)

    @property
    def num_accepted(self) -> int:
        """How many were right."""
        return sum(self.num_accepted_at)

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """Of this number of drafts of a sequence, the first `num_accepted` were right."""
        self.num_drafts += 1
        self.num_tokens += num_tokens
        for position in range(num_accepted):
            self.num_accepted_at[position] += 1

    def copy(self) -> DraftStats:
        """The same counts, which change no more."""
        return DraftStats(list(self.num_accepted_at), self.num_drafts, self.num_tokens)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of the engine at one moment; counters run since the engine was made."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Blocks that no sequence uses and whose content the prefix cache can still find."""
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens of finished and running requests, including cached ones."""
    num_generated_tokens: int
    num_preemptions: int
    num_swapped_blocks: int
    """Blocks copied to the host tier or back."""
    num_prefix_queried_tokens: int
    """Prompt tokens looked up in the prefix cache: all except the last of each prompt, which is always computed, and
    except tokens that must be computed for log-probabilities."""
    num_prefix_hit_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_pinned_blocks: int
    prefix_cache: dict[str, int]
    """Tokens queried, hit (by place), missed (by reason), evicted and spilled; see docs/kv-cache.md."""
    adapters: dict[str, AdapterStats] = field(default_factory=dict)
    """By name, the LoRA adapters that were used."""
    drafts: dict[str, DraftStats] = field(default_factory=dict)
    """By drafter, if any of its drafts was verified."""
    tenant_drafts: dict[str, DraftStats] = field(default_factory=dict)
    """The same by tenant: of the first ones of each engine, and of all others together."""
    drafting_errors: dict[str, int] = field(default_factory=dict)
    """By drafter, exceptions that cost drafts; those in no drafter under an empty name."""

    def __add__(self, other: EngineStats) -> EngineStats:
        """The statistics of two engines together."""
        names = [field.name for field in fields(EngineStats)]
        return EngineStats(**{name: _added(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that sequences use."""
        return self.num_used_blocks / max(1, self.num_blocks)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens found in the prefix cache."""
        return self.num_prefix_hit_tokens / max(1, self.num_prefix_queried_tokens)


def _added(one: Any, other: Any) -> Any:
    """The sum of two numbers, or of the values of two mappings by key."""
    if not isinstance(one, Mapping):
        return one + other
    return {**one, **other, **{key: one[key] + other[key] for key in one.keys() & other.keys()}}


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a beam search."""

    tokens: list[int]
    """Tokens of the prompt and the output, with the token that ended it only if include_stop_str_in_output."""
    cum_logprob: float
    """Sum of the log-probabilities of the output tokens, including the token that ended it."""
    text: str | None = None
    """Text of all `tokens`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of a beam search over one prompt."""

    sequences: list[BeamSearchSequence]
    """Outputs, best first: by cum_logprob / output length ** length_penalty."""
    error: str | None = None
    """Why the search failed; None if it did not."""


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What a pooler made of a text."""

    data: npt.NDArray[np.float32]
    """[size], or [num_tokens, size] for tasks that make a vector for each token. Empty if the request failed."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput(PoolingOutput):
    """The embedding of a text."""

    @property
    def embedding(self) -> list[float]:
        """The vector as a list, which is made anew each time; `data` is the array."""
        return self.data.tolist()  # type: ignore[no-any-return]

    @property
    def hidden_size(self) -> int:
        """Number of elements."""
        return int(self.data.shape[-1])


@dataclass(frozen=True, slots=True)
class ClassificationOutput(PoolingOutput):
    """The classes of a text."""

    @property
    def probs(self) -> list[float]:
        """The probability, or without activation the score, of each class."""
        return self.data.tolist()  # type: ignore[no-any-return]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.data.shape[-1])


@dataclass(frozen=True, slots=True)
class ScoringOutput(PoolingOutput):
    """How well two texts fit together."""

    @property
    def score(self) -> float:
        """The score; NaN if the request failed."""
        return float(self.data.reshape(-1)[0]) if self.data.size else math.nan


_Output = TypeVar("_Output", bound=PoolingOutput, covariant=True)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_Output]):
    """The output of a pooling request; it has a single one, which is final."""

    request_id: str
    outputs: _Output
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    """Tokens whose keys and values came from the prefix cache."""
    prompt: str | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Why the request failed; None if it did not."""
    lora_request: LoRARequest | None = None
    """The LoRA adapter that it used."""


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of one text."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of one text."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair of texts."""
