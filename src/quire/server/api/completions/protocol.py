"""/v1/completions."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.shared.fields import PromptLogprobs, Prompts, SamplingFields, Timings, Usage


class CompletionRequest(SamplingFields, kw_only=True):
    """Prompts to be completed."""

    prompt: Prompts
    suffix: str | None = None
    """Refused: no supported model can fill in text."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned beside each token's own."""


class CompletionLogprobs(msgspec.Struct):
    """OpenAI's older format: parallel lists with one entry for each token of the text."""

    text_offset: list[int]
    """Offset of each token in the choice's text."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or in a stream the next part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    system_fingerprint: str | None = None
