"""What comes out: per request, per sequence, per engine. Attribute names as in vLLM."""

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "ignored"]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """How likely a token was at its place. There can be hundreds of thousands: the garbage collector passes them by."""

    logprob: float
    """natural logarithm; -inf for what could not be drawn. EngineArgs.logprobs_mode says of what"""
    rank: int | None = None
    """among all tokens, from 1"""
    decoded_token: str | None = None
    """its text alone; None without detokenize"""


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request's answer so far."""

    index: int
    text: str
    """while it runs, what no further token can change: it only grows"""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """None while it runs; `ignored`: the prompt was never run, see RequestOutput.error"""
    stop_reason: int | str | None = None
    """the stop token id or stop string that ended it; None for the end-of-sequence token"""
    cumulative_logprob: float | None = None
    """sum over all its tokens, where log-probabilities were asked for or decided which samples come out"""
    logprobs: list[dict[int, Logprob]] | None = None
    """for each of `token_ids`, by token id: the token itself first, then the likeliest, as many as were asked for"""

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request's life, in seconds of time.monotonic()."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's answer so far; cumulative, and final once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """prompt tokens whose keys and values came from the prefix cache"""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """why the request could not be run, if it could not"""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """for each prompt token, if asked for; None where nothing stands before it to predict it. As far as the prompt is
    computed; the first delta alone has them"""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """How likely a model finds a given continuation of a context: what `LLM.score_tokens` returns for each pair."""

    token_ids: list[int]
    """the continuation's"""
    logprobs: list[float]
    """of each, after all before it"""
    ranks: list[int]
    """of each among all tokens, from 1"""
    num_cached_tokens: int
    """tokens of the context whose keys and values came from the prefix cache"""

    @property
    def sum_logprob(self) -> float:
        """Of the continuation as a whole."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> list[bool]:
        """Of each, whether greedy decoding would have chosen it."""
        return [rank == 1 for rank in self.ranks]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters run since it was made."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """blocks that nobody holds and whose content can still be found; the others are free"""
    num_steps: int
    num_prompt_tokens: int
    """prompt tokens of finished and running requests, cached ones included"""
    num_generated_tokens: int
    num_preemptions: int
    num_swapped_blocks: int
    """blocks copied to the host tier or back"""
    num_prefix_queried_tokens: int
    """prompt tokens looked up in the prefix cache: all but the last of each prompt, which is always computed, and
    those that must be computed for log-probabilities"""
    num_prefix_hit_tokens: int
    """of those, found"""
    num_pinned_blocks: int
    prefix_cache: dict[str, int]
    """tokens queried, hit (by where), missed (by why), evicted and spilled; see docs/kv-cache.md"""

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks that sequences hold."""
        return self.num_used_blocks / self.num_blocks

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens found in the prefix cache."""
        return self.num_prefix_hit_tokens / max(1, self.num_prefix_queried_tokens)


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the outputs of a beam search."""

    tokens: list[int]
    """the prompt's and the output's; the token that ended it only with include_stop_str_in_output"""
    cum_logprob: float
    """sum of the log-probabilities of the output, with that of the token that ended it"""
    text: str | None = None
    """of all `tokens`"""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What a beam search over one prompt has found."""

    sequences: list[BeamSearchSequence]
    """the best first: by cum_logprob over the output's length to the power of length_penalty"""
    error: str | None = None
    """why the search could not be run, or not to its end"""
