"""Bodies of Ollama's API, for the endpoints under /api."""

from typing import Any

import msgspec

from quire.server.api.chat.protocol import Tool
from quire.server.api.shared.fields import TokenLogprob


class Options(msgspec.Struct, kw_only=True):
    """Sampling parameters under Ollama's names; other options are ignored."""

    num_predict: int | None = None
    """Maximum number of tokens; negative: as many as fit."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None
    """Accepted without effect: the context is as long as the server's."""
    repeat_last_n: int | None = None
    """Accepted without effect: penalties count all tokens."""
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request."""

    model: str
    stream: bool | None = None
    """Default: true."""
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function that the model called."""

    name: str
    arguments: dict[str, Any] = {}


class Call(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call that the model made."""

    id: str = ""
    function: CalledFunction


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(CommonRequest, kw_only=True):
    """A conversation to be continued. Without messages, the model is only loaded, or put to sleep."""

    messages: list[InputMessage] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(CommonRequest, kw_only=True):
    """A prompt to be answered. Without one, the model is only loaded, or put to sleep."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt is used as it is, without the chat template."""
    context: list[int] | None = None
    """The `context` of an earlier answer, which this prompt continues."""
    suffix: str | None = None
    template: str | None = None
    images: list[str] | None = None


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an answer, or a whole one. The last part is `done`, with durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OutputMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of the model's message."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[Call] | None = None


class ChatAnswer(Answer, kw_only=True, omit_defaults=True):
    """Answer of /api/chat."""

    message: OutputMessage


class GenerateAnswer(Answer, kw_only=True, omit_defaults=True):
    """Answer of /api/generate."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class Details(msgspec.Struct, kw_only=True):
    """Facts about a checkpoint; empty for an id of the hub that was not loaded yet."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, kw_only=True):
    """A model of /api/tags."""

    name: str
    model: str
    modified_at: str
    size: int
    """Size of the weights' files in bytes."""
    digest: str
    """Changes when the names, sizes or dates of these files change."""
    details: Details


class ModelList(msgspec.Struct):
    """Answer of /api/tags."""

    models: list[ListedModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """A model of /api/ps."""

    name: str
    model: str
    size: int
    """Memory that weights, activations and KV cache use."""
    digest: str
    details: Details
    expires_at: str
    size_vram: int = 0
    context_length: int


class RunningList(msgspec.Struct):
    """Answer of /api/ps."""

    models: list[RunningModel]


class ShowRequest(msgspec.Struct, kw_only=True):
    """Names a model, in the newer or the older field."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class ShownModel(msgspec.Struct, kw_only=True):
    """Answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullRequest(msgspec.Struct, kw_only=True):
    """Names a checkpoint of the hub."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    """Default: true."""
    insecure: bool | None = None
    """Accepted without effect."""


class PullStatus(msgspec.Struct, omit_defaults=True):
    """Progress of a download."""

    status: str
    digest: str | None = None
    """Names the download, for clients that show a bar for each: the SHA-256 of the checkpoint's id."""
    total: int | None = None
    """Bytes; None while unknown."""
    completed: int | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """Texts to be embedded."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    """Whether texts that are too long are cut. Default: true."""
    dimensions: int | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None
    """Accepted without effect."""


class EmbedOneRequest(msgspec.Struct, kw_only=True):
    """A text to be embedded, in the older form."""

    model: str
    prompt: str
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None
    """Accepted without effect."""


class Embeddings(msgspec.Struct, kw_only=True):
    """Answer of /api/embed; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(msgspec.Struct, kw_only=True):
    """Answer of /api/embeddings."""

    embedding: list[float]
