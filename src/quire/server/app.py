"""The ASGI application: one table of endpoints, from which routes and /openapi.json are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.api import models
from quire.server.api.chat import endpoint as chat
from quire.server.api.completions import endpoint as completions
from quire.server.api.messages import endpoint as messages
from quire.server.api.ollama import embed as ollama_embed
from quire.server.api.ollama import endpoint as ollama
from quire.server.api.ollama import models as ollama_models
from quire.server.api.pooling import cohere, scores, vectors
from quire.server.api.responses import endpoint as responses
from quire.server.api.tokens import endpoint as tokens
from quire.server.http import openapi
from quire.server.http.bodies import warning
from quire.server.http.endpoint import Endpoint
from quire.server.http.errors import ANTHROPIC_PATH, ApiError, protocol_path, status_error
from quire.server.http.state import ServerState, begin_request, context_of
from quire.server.operations import adapters, admin, debug, health
from quire.server.page import endpoint as page

Wrap: TypeAlias = Callable[[ASGIApp, Endpoint], ASGIApp]
"""Wraps one endpoint in middleware, such as authentication."""

_MODULES = (completions, chat, responses, messages, ollama, ollama_embed, ollama_models, models, vectors, cohere,
            scores, tokens, health, admin, adapters, debug, page)  # fmt: skip
ROUTES: tuple[Endpoint, ...] = tuple([row for module in _MODULES for row in module.ENDPOINTS])
"""All endpoints except /openapi.json, which describes them."""


def make_app(
    state: ServerState,
    *,
    routes: Sequence[Endpoint] = ROUTES,
    around: Sequence[Middleware] = (),
    wrap: Wrap | None = None,
) -> Application:
    """The ASGI application.

    `around` is middleware for all requests, including unknown paths, the first outermost; `wrap` adds middleware to
    each endpoint. Both can use the request's context (`context_of(scope)`) and raise ApiError before a response begins.
    """
    routes = (*routes, openapi.endpoint(routes))
    literal = frozenset(row.path for row in routes if "{" not in row.path)
    return Application(
        state,
        Router(
            [
                _PathRoute(literal, row.path, row if wrap is None else wrap(row, row), methods=[row.method])
                for row in routes
            ],
            redirect_slashes=False,
            middleware=around,
        ),
    )


class _PathRoute(Route):
    """A route, which the context of a request names. One with parameters does not match the paths that others have
    without: `input_tokens` is no response."""

    def __init__(self, literal: frozenset[str], path: str, endpoint: ASGIApp, *, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.app = endpoint  # which may be a function: for starlette that would be one of a Request
        self._others = literal - {path}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether it serves this request."""
        is_other = scope["type"] == "http" and scope["path"] in self._others
        found = (Match.NONE, {}) if is_other else super().matches(scope)
        if found[0] is Match.FULL:
            context_of(scope).route = self.path
        return found


class Application:
    """The outermost layer: it creates a request's context, adds its headers to the response, and turns exceptions into
    responses. Handlers find it as `request.app`. The router is the only layer below, so that refusals are fast."""

    def __init__(self, state: ServerState, router: Router) -> None:
        self.state = state
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other protocols go through."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        scope["app"] = self
        context, has_begun = begin_request(scope), False

        async def send_with_context(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.request_id
                if protocol_path(scope).startswith(ANTHROPIC_PATH):
                    headers["request-id"] = context.request_id
                if context.unknown_fields:
                    headers["x-quire-warning"] = warning(context.unknown_fields)
            await send(message)

        try:
            await self._router(scope, receive, send_with_context)
        except Exception as error:
            answer = context.api_error(self._refusal(scope, error) if isinstance(error, HTTPException) else error)
            if not has_begun:  # otherwise the response is truncated: HTTP has no way to report an error now
                await answer.to_response(protocol_path(scope))(scope, receive, send_with_context)

    def _refusal(self, scope: Scope, error: HTTPException) -> ApiError:
        """The response for an unknown path or method; for a method it lists those of the path."""
        headers = dict(error.headers or {})
        if error.status_code == 405:
            matching = [r for r in self._router.routes if r.matches(scope)[0] is not Match.NONE]
            methods = {method for r in matching if isinstance(r, Route) for method in r.methods or ()}
            headers["Allow"] = ", ".join(sorted(methods))
        return status_error(error.status_code, scope["method"], scope["path"], headers)
