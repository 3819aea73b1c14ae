"""`/v1/responses`: answers that are kept, gone on with, and made in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from quire.server.bodies import read_struct
from quire.server.chat_events import ChatEvent
from quire.server.errors import ApiError, api_error, invalid
from quire.server.protocol.responses import (
    DeletedResponse,
    ItemList,
    Reasoning,
    Response,
    ResponseError,
    ResponsesRequest,
    TextConfig,
)
from quire.server.response_store import ChainTooLongError, ResponseStore, StoredResponse, StoreError, StoreFullError
from quire.server.responses_input import chat_request, check_request, is_response_id, new_id, own_items
from quire.server.responses_stream import Event, ResponseBuilder

MAX_KEPT_STREAMS = 32
"""background streams that have ended and can still be read again"""


class _Ended(msgspec.Struct):
    """What the next response needs to know of one."""

    status: str
    output: list[dict[str, Any]]


@dataclass(kw_only=True)
class Run:
    """One response in the making. `frames` are its stream so far, kept only for a background stream."""

    owner: str
    builder: ResponseBuilder
    chat: Callable[[], AsyncIterator[ChatEvent]]
    """starts the chat; closing the iterator aborts it"""
    count_tokens: Callable[[str], Any]
    request_id: str
    input_items: list[dict[str, Any]]
    is_stored: bool
    error: ApiError | None = None
    task: asyncio.Task[None] | None = None
    frames: list[bytes] = field(default_factory=list)
    keeps_frames: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    @property
    def id(self) -> str:
        return self.builder.response.id

    def stored(self) -> StoredResponse:
        """How it stands now, as it is kept."""
        response = self.builder.response
        return StoredResponse(
            response.id,
            response.previous_response_id,
            response.status == "in_progress",
            msgspec.json.encode(response),
            msgspec.json.encode(self.input_items),
        )
