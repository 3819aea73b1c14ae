"""/tokenize, /detokenize and /tokenizer_info; /v1/models and what tells how the server is."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.api.chat.protocol import ChatMessage, Tool
from quire.server.api.shared.fields import Count


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text or a conversation to be made tokens of."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """None: with a prompt yes, with messages no, since their template writes them"""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Its tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Tokens to be made text of."""

    model: str | None = None
    tokens: list[Count]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Their text, special tokens spelled out."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What clients that count or cut prompts themselves need to know."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    """the checkpoint"""
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All of them."""

    object: str = "list"
    data: list[ModelCard]


class Status(msgspec.Struct, kw_only=True):
    """How it goes, in a word."""

    status: str


class Version(msgspec.Struct, kw_only=True):
    """Of Quire."""

    version: str


class Load(msgspec.Struct, kw_only=True):
    """Requests in flight that generate."""

    server_load: int
