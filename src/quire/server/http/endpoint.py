"""Endpoints: the rows of the table from which routes and /openapi.json are made."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.state import context_of, state_of

Handler: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]
"""Returns the response to a request. May raise ApiError, RequestError or any other exception."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint."""

    path: str
    """Path with parameters such as `/v1/models/{model}`; `{name:path}` may contain slashes."""
    method: Literal["GET", "POST", "DELETE"]
    handler: Handler
    summary: str
    _: KW_ONLY
    request: type[msgspec.Struct] | None = None
    """Type of the request body."""
    response: Any = None
    """Type of the response body, which msgspec must be able to describe. None: not JSON."""
    chunk: Any = None
    """Type of an event's data, if the response can be a stream."""
    media_type: str = "application/json"
    binary: str | None = None
    """Media type of the bytes that the response can also be."""
    generates: bool = False
    """Whether it makes the engine generate: such requests are counted and limited."""
    kind: Literal["api", "admin", "health", "metrics", "page"] = "api"
    """Determines access: `api` requires a key if keys are configured, `admin` always requires one for administration.
    """
    statuses: tuple[int, ...] = ()
    """Statuses that only this endpoint returns."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as an ASGI application; returns when the response was sent or the client disconnected."""
        request = Request(scope, receive, send)
        state = state_of(request)
        state.num_in_flight += self.generates
        try:
            answer = await self.handler(request)
            await answer(scope, receive, send)
        finally:
            state.num_in_flight -= self.generates
            context_of(request).end()


async def choices_response(body: Any) -> Response:
    """The answer in JSON of a body with `choices`: many log-probabilities are written in a thread, and choice by choice
    even there, since nothing else runs while the encoder does."""
    fields = "logprobs", "prompt_logprobs"
    if not any(getattr(part, name, None) for part in (body, *body.choices) for name in fields):
        return json_response(body)

    def encode() -> bytes:
        choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in body.choices]
        return msgspec.json.encode(msgspec.structs.replace(body, choices=choices))

    return Response(await asyncio.to_thread(encode), media_type="application/json")


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
