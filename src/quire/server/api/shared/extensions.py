"""Additional fields of `/v1/responses` and `/v1/messages` that work as in chats."""

from __future__ import annotations

from typing import Any

from quire.server.api.shared.fields import CommonSampling


class ChatExtensions(CommonSampling, kw_only=True):
    """Fields that the protocol does not have; docs/sampling.md defines them."""

    chat_template_kwargs: dict[str, Any] | None = None


def fields_of(request: ChatExtensions) -> dict[str, Any]:
    """The fields that were set, for the body of a chat request."""
    given = {name: getattr(request, name) for name in ChatExtensions.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}
