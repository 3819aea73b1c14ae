"""/v1/completions."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.shared.fields import PromptLogprobs, Prompts, SamplingFields, Timings, Usage


class CompletionRequest(SamplingFields, kw_only=True):
    """Prompts to be continued."""

    prompt: Prompts
    suffix: str | None = None
    """refused: no model here fills in"""
    logprobs: int | None = None
    """of each token, and of so many of the likeliest"""


class CompletionLogprobs(msgspec.Struct):
    """OpenAI's older shape: lists side by side, one entry for each token of the text."""

    text_offset: list[int]
    """where each token begins in the choice's text"""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A continuation, or in a stream more of one."""

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
