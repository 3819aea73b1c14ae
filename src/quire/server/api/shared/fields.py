"""Types that the request and response bodies of several endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.common.outputs import RequestMetrics
from quire.common.params import StructuredOutputsParams

Prompts = str | list[str | int | list[int]]
"""A string, a list of token ids, or a list of either."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name."""

    name: str = "response"
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """Accepted without effect: every output matches the schema, and has no properties that it does not mention."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's format for a constraint on the output, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    """The format of a structural tag."""
    structures: list[dict[str, Any]] | None = None
    """Of a structural tag in its older form."""
    triggers: list[str] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream contains besides text."""

    include_usage: bool | None = None
    """Send a last chunk with the usage and without choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk."""


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """OpenAI's form of the expected output."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


class CommonSampling(msgspec.Struct, kw_only=True):
    """Sampling parameters that requests of every protocol may have, under the names of SamplingParams."""

    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    cache_salt: str | None = None
    priority: int | None = None


class ChatExtensions(CommonSampling, kw_only=True):
    """Fields that the protocol does not have; docs/sampling.md defines them."""

    chat_template_kwargs: dict[str, Any] | None = None


def fields_of(request: ChatExtensions) -> dict[str, Any]:
    """The fields that were set, for the body of a chat request."""
    given = {name: getattr(request, name) for name in ChatExtensions.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}


class SamplingFields(CommonSampling, kw_only=True):
    """Fields for sampling and stopping: those of SamplingParams under the same names, and OpenAI's names for others.

    None always stands for the default of the checkpoint or of this server.
    """

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None
    """The user of the request, for fair scheduling; by default the API key's name."""

    prediction: str | Prediction | None = None
    """What the output is expected to be. Where it is right, it is generated faster; no token changes."""

    use_beam_search: bool | None = None
    """Search `n` beams instead of sampling."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    response_format: ResponseFormat | None = None
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
    """Log-probabilities name tokens `token_id:123` instead of by their text."""
    request_id: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far; as in vLLM, only together with `includes_usage`."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int = 0
    """Tokens found in the prefix cache."""


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    accepted_prediction_tokens: int = 0
    """Tokens of the prediction that were tried and were right."""
    rejected_prediction_tokens: int = 0
    """Tokens of the prediction that were tried and were wrong. Unlike OpenAI's they are not among completion_tokens."""


class Usage(msgspec.Struct, frozen=True):
    """Numbers of prompt and generated tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(
        cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int, predicted: tuple[int, int] | None = None
    ) -> Usage:
        """The usage for these counts; `predicted` has the accepted and the rejected tokens of the prediction, and is
        None where nothing is generated."""
        total, details = prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
        of_completion = UNSET if predicted is None else CompletionTokensDetails(*predicted)
        return cls(prompt_tokens, completion_tokens, total, details, of_completion)


class Timings(msgspec.Struct, frozen=True):
    """Durations of a request's phases in seconds; None for a phase that it did not reach."""

    queue_s: float | None
    """Time from the arrival in the engine to the first step."""
    prefill_s: float | None
    """Time from the first step to the first token."""
    decode_s: float | None
    """Time from the first token to the end."""
    total_s: float | None
    num_preemptions: int = 0
    num_drafts: int = 0
    """Tokens that were proposed and verified."""
    num_accepted_drafts: int = 0

    @classmethod
    def of(cls, metrics: RequestMetrics | None) -> Timings | None:
        """Durations between the times that the engine recorded."""
        if metrics is None:
            return None
        start, end = metrics.arrival_time, metrics.finished_time
        run, first = metrics.first_scheduled_time, metrics.first_token_time
        laps = _lap(start, run), _lap(run, first), _lap(first, end), _lap(start, end)
        return cls(*laps, metrics.num_preemptions, *metrics.num_drafts)


def _lap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 6)


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    """UTF-8 of the token, which may be a part of a character: those of all tokens are joined that of the text."""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A generated token, and the most likely ones at its position."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[TopLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of a token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Log-probabilities by position, then by token id; None for the first token."""

Count = Annotated[int, msgspec.Meta(ge=0)]
