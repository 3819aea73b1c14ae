"""Additional fields of `/v1/responses` and `/v1/messages` that work as in chats."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.common.params import StructuredOutputsParams


class ChatExtensions(msgspec.Struct, kw_only=True):
    """Sampling parameters that the protocol does not have; docs/sampling.md defines them."""

    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def fields_of(request: ChatExtensions) -> dict[str, Any]:
    """The fields that were set, for the body of a chat request."""
    given = {name: getattr(request, name) for name in ChatExtensions.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}
