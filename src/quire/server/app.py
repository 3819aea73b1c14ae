"""The application: one table of endpoints, from which requests are routed and /openapi.json is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import chat, completions, debug, health, messages, models, openapi, responses, static_page, tokens
from quire.server.bodies import warning
from quire.server.endpoint import Endpoint
from quire.server.errors import ANTHROPIC_PATH, status_error
from quire.server.state import ServerState, add_context, context_of

Wrap: TypeAlias = Callable[[ASGIApp, Endpoint], ASGIApp]
"""puts something around one endpoint, such as its guard"""

ROUTES: tuple[Endpoint, ...] = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *models.ENDPOINTS,
    *tokens.ENDPOINTS,
    *health.ENDPOINTS,
    *debug.ENDPOINTS,
    *static_page.ENDPOINTS,
)
"""what is served, but for /openapi.json, which describes it"""


def make_app(
    state: ServerState,
    *,
    routes: Sequence[Endpoint] = ROUTES,
    around: Sequence[Middleware] = (),
    wrap: Wrap | None = None,
) -> Starlette:
    """The ASGI application.

    `around` stands around everything, paths that nobody knows too, the first outermost; `wrap` around each endpoint.
    Both find the request's context (`context_of(scope)`), and may raise ApiError before an answer begins.
    """
    routes = (*routes, openapi.endpoint(routes))
    app = Starlette(
        routes=[
            Route(row.path, row if wrap is None else wrap(row, row), methods=[row.method], name=row.summary)
            for row in routes
        ],
        middleware=[Middleware(RequestFrame), *around],
        exception_handlers={HTTPException: _refused_by_router},
    )
    app.router.redirect_slashes = False
    app.state.quire = state
    return app


class RequestFrame:
    """Around everything: begins a request's context, puts it into the answer's headers, and answers exceptions."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other protocols go through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context, has_begun = add_context(scope), False

        async def send_with_context(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.request_id
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers["request-id"] = context.request_id
                if context.unknown_fields:
                    headers["x-quire-warning"] = warning(context.unknown_fields)
            await send(message)

        try:
            await self.app(scope, receive, send_with_context)
        except Exception as error:
            answer = context.api_error(error)
            if not has_begun:  # else it is cut off: there is no way to say more
                await answer.to_response(scope["path"])(scope, receive, send_with_context)


async def _refused_by_router(request: Request, error: Exception) -> Response:
    """No such path, or no such method there: then all that the path has are named."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        matching = [r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
    found = context_of(request).api_error(status_error(error.status_code, request.method, request.url.path, headers))
    return found.to_response(request.url.path)
