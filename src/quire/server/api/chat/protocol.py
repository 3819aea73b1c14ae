"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.shared.fields import PromptLogprobs, SamplingFields, Timings, TokenLogprob, Usage


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message. Only text is read."""

    type: str = "text"
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of a call in a message."""

    name: str
    arguments: str = "{}"
    """a JSON object"""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation; the template reads it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """a JSON schema; None: no arguments"""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool: always a function."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """This function is to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """A conversation to be answered."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    """instead of max_tokens"""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    """refused unless the server allows it"""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    """a variable of the template"""
    documents: list[dict[str, Any]] | None = None
    """a variable of the template"""
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    verbosity: str | None = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a choice."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """More of a call's function."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallChunk(msgspec.Struct, frozen=True):
    """More of a call."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """the same, for clients that look for it here"""
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ResponseMessage(msgspec.Struct, kw_only=True):
    """The message of a choice."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: str | None = None
    service_tier: str | UnsetType = UNSET
