"""The events of a chat's answer. Streams and whole responses of every chat protocol are made from them.

Each choice has deltas in any order, then one ChoiceFinished. One UsageEvent ends the answer; with
`continuous_usage_stats`, another one precedes the deltas of each step. The division of a text into deltas depends on
timing and has no meaning.
"""

from typing import Literal, TypeAlias

import msgspec

from quire.server.api.shared.fields import PromptLogprobs, Timings, TokenLogprob, Usage

ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptEvent(msgspec.Struct, frozen=True):
    """The prompt's tokens or log-probabilities, if the request asked for them; precedes all other events."""

    token_ids: list[int] | None
    logprobs: PromptLogprobs | None


class ContentDelta(msgspec.Struct, frozen=True):
    """The next part of the text; empty if the event only carries tokens."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the tokens since the last delta of this choice that had any."""
    token_ids: list[int] | None = None
    """The ids of the same tokens, with `return_token_ids`."""
    drafted: bool = False
    """With `mark_drafts`, whether the text comes from accepted drafts."""


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next part of the reasoning."""

    index: int
    text: str
    drafted: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The next part of a call: the first has the id and the name, the others continue the arguments' JSON."""

    index: int
    tool_index: int
    id: str | None
    name: str | None
    arguments: str


class ChoiceFinished(msgspec.Struct, frozen=True):
    """The choice is complete."""

    index: int
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    """The stop token id or stop string that ended the choice."""
    timings: Timings | None = None
    """Timings of the request, with the last choice that finishes."""


class UsageEvent(msgspec.Struct, frozen=True):
    """Numbers of tokens so far."""

    usage: Usage
    timings: Timings | None = None
    """Set in the last event only."""


ChoiceEvent: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta | ChoiceFinished
ChatEvent: TypeAlias = PromptEvent | ChoiceEvent | UsageEvent
