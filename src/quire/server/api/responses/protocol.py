"""Request and response bodies of `/v1/responses` and their items, with the names of OpenAI's API."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from quire.server.api.chat.protocol import FunctionDefinition
from quire.server.api.shared.fields import ChatExtensions

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]


class InputText(msgspec.Struct, tag="input_text"):
    """Text that a user, a developer or a tool wrote."""

    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class Refusal(msgspec.Struct, tag="refusal"):
    """Text with which a model declined to answer; accepted as input only."""

    refusal: str


class InputImage(msgspec.Struct, tag="input_image"):
    """Refused: supported models read text only."""


class InputFile(msgspec.Struct, tag="input_file"):
    """Refused: supported models read text only."""


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """A model's reasoning before its answer."""

    text: str


class SummaryText(msgspec.Struct, tag="summary_text"):
    """A summary of a model's reasoning; accepted as input only."""

    text: str


InputPart = InputText | OutputText | Refusal | InputImage | InputFile


class InputItem(msgspec.Struct):
    """One item of a conversation, an input or an earlier output; `type` determines which fields are used. In
    the place of an earlier output, a reference has its `id`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = None
    status: str | None = None
    role: Role | None = None
    """For `message`: its author."""
    content: str | list[InputPart | ReasoningText] | None = None
    """For `message` and `reasoning`: the text."""
    call_id: str | None = None
    """For `function_call` and `function_call_output`: the id of the call."""
    name: str | None = None
    """For `function_call`: the name of the function."""
    arguments: str | None = None
    """For `function_call`: JSON."""
    output: str | list[InputPart] | None = None
    """For `function_call_output`: the function's result."""
    summary: list[SummaryText] | None = None
    """For `reasoning`: used if `content` is missing."""


class FunctionTool(FunctionDefinition, tag="function", omit_defaults=False):
    """A function that the model may call."""


class FunctionChoice(msgspec.Struct, tag="function"):
    """Call this function."""

    name: str


class AllowedTools(msgspec.Struct, tag="allowed_tools"):
    """Call these functions only, at least one of them with `required`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], msgspec.Meta(min_length=1)]


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools


class TextFormat(msgspec.Struct, tag="text", frozen=True):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON that matches a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class StructuralTagFormat(msgspec.Struct, tag="structural_tag", omit_defaults=True):
    """Text with structured parts, as vLLM describes it, in either form. OpenAI's API does not have it."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class TextConfig(msgspec.Struct):
    """The format of the output text."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat = TextFormat()


class Reasoning(msgspec.Struct):
    """Options for reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(ChatExtensions, kw_only=True):
    """Body of `POST /v1/responses`; docs/responses.md explains each field."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """None: if the server stores any."""
    stream: bool | None = False
    background: bool | None = False
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    conversation: Any = None
    prompt: Any = None


class OutputMessage(msgspec.Struct, tag="message"):
    """Text of the assistant."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCall(msgspec.Struct, tag="function_call"):
    """A function call that the client should execute."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """The model's reasoning."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class InputTokensDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Always 0: caching has no separate cost."""


class OutputTokensDetails(msgspec.Struct):
    """Details of the generated tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Numbers of input and output tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """The response object."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None = None
    status: Status = "in_progress"
    model: str
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    tools: list[FunctionTool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig
    reasoning: Reasoning
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
    metadata: dict[str, str] = {}
    truncation: Literal["auto", "disabled"] = "disabled"
    service_tier: str = "default"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class InputTokens(msgspec.Struct):
    """Answer of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    """Answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct):
    """Answer of `GET /v1/responses/{id}/input_items`."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
