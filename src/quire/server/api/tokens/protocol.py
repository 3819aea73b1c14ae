"""Bodies of /tokenize, /detokenize, /tokenizer_info, /v1/models and the endpoints that report the server's state."""

from typing import Any

import msgspec

from quire.server.api.chat.protocol import ChatMessage, Tool
from quire.server.api.shared.fields import Count


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text or a conversation to be tokenized."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Default: true with a prompt, false with messages, because the chat template adds them."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """The token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Tokens to be converted to text."""

    model: str | None = None
    tokens: list[Count]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The text of the tokens, including special tokens."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Facts for clients that count or truncate prompts themselves."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    """The checkpoint, or the folder of a LoRA adapter."""
    parent: str | None = None
    """The base model of a LoRA adapter."""
    max_model_len: int | None
    """None as long as the model was never loaded."""
    status: str
    """`loaded`, `loading`, `asleep`, `restarting` or `failed`; a request wakes up a model that is asleep."""
    num_engines: int = 1
    """Engines among which its requests are spread."""


class ModelList(msgspec.Struct, kw_only=True):
    """All names of the served models."""

    object: str = "list"
    data: list[ModelCard]


class AnthropicModelCard(msgspec.Struct, kw_only=True):
    """A served model, for a client that sends `anthropic-version`."""

    type: str = "model"
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: str = "active"
    max_input_tokens: int | None
    """None as long as the model was never loaded."""


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """All names of the served models, on one page."""

    data: list[AnthropicModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class Status(msgspec.Struct, kw_only=True):
    """The state of the server."""

    status: str


class Version(msgspec.Struct, kw_only=True):
    """The version of Quire."""

    version: str


class Load(msgspec.Struct, kw_only=True):
    """The number of requests that generate at the moment."""

    server_load: int
