"""What happens while a chat is answered. Streams and whole answers of every chat protocol are made of these events.

For each choice: deltas in any order, then one ChoiceFinished. Then one UsageEvent ends the answer; with
`continuous_usage_stats` one more comes before the deltas of each step. How text is cut into deltas depends on timing
and means nothing.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from quire.server.api.shared.fields import PromptLogprobs, Timings, TokenLogprob

ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptEvent(msgspec.Struct, frozen=True):
    """What the request asked to be told of its prompt; before everything else, only if it did."""

    token_ids: list[int] | None
    logprobs: PromptLogprobs | None


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer's text; empty where there are only tokens to be told of."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None
    """of the tokens since the last delta of this choice that had any"""
    token_ids: list[int] | None = None
    """the same tokens, with `return_token_ids`"""


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    index: int
    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of a call: its first delta has the id and the name, the others more of the arguments' JSON."""

    index: int
    tool_index: int
    id: str | None
    name: str | None
    arguments: str


class ChoiceFinished(msgspec.Struct, frozen=True):
    """No more deltas of this choice come."""

    index: int
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    """the stop token id or stop string that ended it"""
    timings: Timings | None = None
    """the request's, with the last choice that finishes"""


class UsageEvent(msgspec.Struct, frozen=True):
    """Tokens so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """of the prompt's, those found in the prefix cache"""
    timings: Timings | None = None
    """in the last one"""


ChatEvent: TypeAlias = PromptEvent | ContentDelta | ReasoningDelta | ToolCallDelta | ChoiceFinished | UsageEvent
