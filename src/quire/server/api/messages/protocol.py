"""Bodies of `/v1/messages`: what is asked and what is answered. Names as in Anthropic's API."""

from typing import Annotated, Any, Literal

import msgspec

from quire.server.api.shared.extensions import ChatExtensions

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag="text"):
    """Text, of either side."""

    text: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call that the client is to make."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thought before it answered."""

    thinking: str
    signature: str = ""
    """empty: nothing is signed, and what comes back is not checked"""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Thoughts that only another server can read; passed over."""


class ImageBlock(msgspec.Struct, tag="image"):
    """Refused: no model served here sees."""


class DocumentBlock(msgspec.Struct, tag="document"):
    """Refused: no model served here reads files."""


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = False


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ImageBlock | DocumentBlock


class InputMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    """Whether and what to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """with `tool`: which one"""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether to think before the answer, for a model whose template can turn it on and off."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class OutputFormat(msgspec.Struct):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The form of the answer, and how much to think."""

    format: OutputFormat | None = None
    effort: str | None = None


class RequestMetadata(msgspec.Struct):
    """About the request."""

    user_id: str | None = None


class CountTokensRequest(ChatExtensions, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`; docs/messages.md has what each field does."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    output_config: OutputConfig | None = None
    service_tier: str | None = None
    container: Any = None
    mcp_servers: Any = None


class TokenCount(msgspec.Struct):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens read and generated. All three kinds of input add up to the prompt."""

    input_tokens: int
    """that no cached block held"""
    output_tokens: int
    cache_read_input_tokens: int = 0
    """whose keys and values were in the cache"""
    cache_creation_input_tokens: int = 0
    """always 0: caching costs nothing and is not counted apart"""


class Message(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock | ThinkingBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
