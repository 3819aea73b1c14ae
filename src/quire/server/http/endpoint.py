"""Endpoints: rows of a table that says what the server answers, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.state import state_of

Handler: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]
"""takes a request and gives its answer; raises ApiError, RequestError or anything else, which are answered too"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One row."""

    path: str
    """with parameters as in `/v1/models/{model}`, `{name:path}` for one that may have slashes"""
    method: Literal["GET", "POST", "DELETE"]
    handler: Handler
    summary: str
    request: type[msgspec.Struct] | None = None
    """its body"""
    response: Any = None
    """body of the answer, of a type that msgspec can describe; None: no JSON"""
    chunk: Any = None
    """data of one event, where the answer can be a stream"""
    media_type: str = "application/json"
    generates: bool = False
    """makes the engine generate: counted, and admitted only within limits"""
    kind: Literal["api", "health", "metrics", "page"] = "api"
    """who may call it: `api` needs a key where there are keys"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application; returns when the answer is sent or nobody is there to read it."""
        request = Request(scope, receive, send)
        state = state_of(request)
        state.num_in_flight += self.generates
        try:
            answer = await self.handler(request)
            await answer(scope, receive, send)
        finally:
            state.num_in_flight -= self.generates


async def choices_response(body: Any) -> Response:
    """The answer in JSON of a body with `choices`: many log-probabilities are written in a thread, and choice by choice
    even there, since nothing else runs while the encoder does."""
    if all(choice.logprobs is None for choice in body.choices):
        return json_response(body)

    def encode() -> bytes:
        choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in body.choices]
        return msgspec.json.encode(msgspec.structs.replace(body, choices=choices))

    return Response(await asyncio.to_thread(encode), media_type="application/json")


def json_response(body: Any, status: int = 200) -> Response:
    """The answer in JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
