"""Request and response bodies of `/v1/messages`, with the names of Anthropic's API."""

from typing import Annotated, Any, Literal

import msgspec

from quire.server.api.shared.fields import ChatExtensions

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag="text"):
    """Text of the user or the assistant."""

    text: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A tool call that the client should execute."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """The model's reasoning before its answer."""

    thinking: str
    signature: str = ""
    """Always empty: nothing is signed, and signatures in requests are not checked."""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Reasoning that only another server can read; ignored."""


class ImageBlock(msgspec.Struct, tag="image"):
    """Refused: supported models read text only."""


class DocumentBlock(msgspec.Struct, tag="document"):
    """Refused: supported models read text only."""


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = False


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ImageBlock | DocumentBlock


class InputMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool, with `tool`."""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether to reason before the answer, for models whose chat template can switch it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """`between_tools` is `disabled` with a form of Claude's progress reports, which other models do not write."""
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(msgspec.Struct):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The format of the answer, and the reasoning effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class RequestMetadata(msgspec.Struct):
    """Metadata of the request."""

    user_id: str | None = None


class CountTokensRequest(ChatExtensions, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`; docs/messages.md explains each field."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = None
    container: Any = None
    mcp_servers: Any = None


class TokenCount(msgspec.Struct):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessageUsage(msgspec.Struct):
    """Numbers of tokens. The three numbers of input tokens add up to the prompt."""

    input_tokens: int
    """Prompt tokens that were not found in the prefix cache."""
    output_tokens: int
    cache_read_input_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    """Always 0: caching has no separate cost."""


class Message(msgspec.Struct, kw_only=True):
    """The response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock | ThinkingBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
