"""What bodies of several endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quire.common.outputs import RequestMetrics
from quire.common.params import StructuredOutputsParams

Prompts = str | list[str | int | list[int]]
"""a text, token ids, or a list of either"""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name."""

    name: str = "response"
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """accepted: every answer is strict"""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's way to ask for a form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    """a last chunk with no choices and the usage"""
    continuous_usage_stats: bool | None = None
    """the usage so far in every chunk"""


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are chosen and when to stop: SamplingParams' fields under their own names, and OpenAI's for others.

    None always means: what the checkpoint or this server takes where nothing is said.
    """

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    """whose request it is, for fair scheduling; else it is the API key's"""

    use_beam_search: bool | None = None
    """`n` beams"""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """tokens in log-probabilities are written `token_id:123`"""
    request_id: str | None = None

    @property
    def includes_usage(self) -> bool:
        """A stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Every chunk of a stream has the usage so far; only together with the last one, as in vLLM."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """More about the prompt's tokens."""

    cached_tokens: int = 0
    """found in the prefix cache"""


class Usage(msgspec.Struct, frozen=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """Of these counts."""
        details = PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class Timings(msgspec.Struct, frozen=True):
    """Where a request's time went, in seconds; None for what it never came to."""

    queue_s: float | None
    """from its arrival at the engine until it ran"""
    prefill_s: float | None
    """until its first token"""
    decode_s: float | None
    """from there to its end"""
    total_s: float | None
    num_preemptions: int = 0

    @classmethod
    def of(cls, metrics: RequestMetrics | None) -> Timings | None:
        """From the engine's moments."""
        if metrics is None:
            return None
        start, end = metrics.arrival_time, metrics.finished_time
        run, first = metrics.first_scheduled_time, metrics.first_token_time
        return cls(_lap(start, run), _lap(run, first), _lap(first, end), _lap(start, end), metrics.num_preemptions)


def _lap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 6)


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that was likely at a place."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token of the answer, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[TopLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """How likely a token is at a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""by position, then by token id; None for the first token"""

Count = Annotated[int, msgspec.Meta(ge=0)]
