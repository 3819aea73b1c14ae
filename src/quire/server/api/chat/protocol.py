"""/v1/chat/completions."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.shared.fields import PromptLogprobs, SamplingFields, Timings, TokenLogprob, Usage


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message. Only text is supported, to which the refusal of a model belongs."""

    type: str = "text"
    text: str | None = None
    refusal: str | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.type == "refusal" and self.refusal:
            self.type, self.text = "text", self.refusal
        self.refusal = UNSET


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function and arguments of a call."""

    name: str
    arguments: str = "{}"
    """A JSON object."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation, which is passed to the chat template."""

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
    """A JSON schema. None: no arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool, which is always a function."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """One of the tools."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that the model may call; with `required`, it must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1)]


class ToolSelection(msgspec.Struct, kw_only=True):
    """The function that the model must call, or the tools that it may call."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")
        if self.type == "allowed_tools":
            self.function = None

    @property
    def names(self) -> list[str]:
        """The names of these functions."""
        tools = [] if self.allowed_tools is None else self.allowed_tools.tools
        return [tool.function.name for tool in tools] if self.function is None else [self.function.name]


ToolChoice: TypeAlias = Literal["none", "auto", "required", "any"] | ToolSelection
"""`any` is Mistral's name for `required`."""


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """A conversation that the model continues."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    """Takes precedence over max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    """Refused unless the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    mark_drafts: bool | None = None
    """Begin a new chunk of a stream where accepted drafts begin and end, and mark those of drafts."""
    reasoning_effort: str | None = None
    """A variable of the chat template."""
    documents: list[dict[str, Any]] | None = None
    """A variable of the chat template."""
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    verbosity: str | None = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the tokens of a choice."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next part of a call's function."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallChunk(msgspec.Struct, frozen=True):
    """The next part of a call."""

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
    """The same text, for clients that expect it under this name."""
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    drafted: bool | UnsetType = UNSET
    """With `mark_drafts`, true if the text comes from accepted drafts."""


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
    reasoning: str | None = None
    """None if there is none; vLLM's clients read the field in any case."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a whole response."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole response."""

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
