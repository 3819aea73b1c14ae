"""State that handlers and middleware use: one ServerState for the server, one RequestContext for each HTTP request."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Scope

from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError, api_error

if TYPE_CHECKING:
    from quire.server.api.responses.run import StoredResponses
    from quire.server.models.pool import ModelPool
    from quire.server.operations.metrics import Metrics

MAX_REQUEST_ID_LEN = 128
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client disconnected before it was answered: nginx's number, seen in logs only."""
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
UNKNOWN_ROUTE = "other"
MAX_LOGGED_PATH = 100
"""Characters of a path that are kept for the log."""
_CONTEXT = "quire"
"""Key of the RequestContext in the ASGI scope."""


@dataclass(kw_only=True)
class ServerState:
    """One server: its models, its arguments and what it keeps between requests. It is `request.app.state`.

    Handlers may change the counters, `is_draining` and `responses`; everything else stays as it was created.
    """

    models: ModelPool
    args: ServerArgs
    started: float = field(default_factory=time.time)
    num_in_flight: int = 0
    """Requests that generate, at this moment."""
    num_values: int = 0
    """Values in the bodies of running requests that have many."""
    num_body_bytes: int = 0
    """Size of all bodies that are being received, at this moment."""
    num_cache_watchers: int = 0
    """Open streams of /debug/cache/events."""
    shows_tokens: Callable[[], bool] = lambda: False
    """Whether all callers are one tenant, so that any of them may read the tokens in the cache."""
    is_draining: bool = False
    """The server is shutting down, which /ready reports."""
    responses: StoredResponses | None = None
    """Stored responses; opened when first needed."""
    metrics: Metrics | None = None
    """Metrics, where they are collected."""


@dataclass(kw_only=True, slots=True)
class RequestContext:
    """One HTTP request, from its headers to the end of its response, and the only state of it.

    Middleware, handlers and the engine's listener fill it in; logs, metrics and traces read it at the end. It holds no
    text of prompts or responses, except `body` where an operator asked for it.
    """

    request_id: str
    """Chosen by the client or drawn at random; sent back as `x-request-id`."""
    is_named: bool = False
    """Whether the client chose the id."""
    method: str = "other"
    """`other` for methods that HTTP does not define, so that metrics stay bounded."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    route: str = UNKNOWN_ROUTE
    """Path template of the endpoint, UNKNOWN_ROUTE if there is none: a bounded set of values."""
    path: str = ""
    """The path as the client sent it, cut; for people to read only, since clients choose it."""
    tenant: str = ""
    """Name of the API key, if keys are in use."""
    model: str = ""
    """Name under which the model was requested."""
    base_model: str = ""
    """The first name of the model, also where `model` is a LoRA adapter of it."""
    field_names: dict[str, str] = field(default_factory=dict)
    """The body's names for fields that error messages of the engine call otherwise, as `prompt`: see `api_error`."""
    unknown_fields: list[str] = field(default_factory=list)
    """Fields of the body that were ignored; reported as `x-quire-warning`."""
    body: bytearray | None = None
    """Beginning of the body, if bodies are logged."""
    params: SamplingParams | BeamSearchParams | PoolingParams | None = None
    """Parameters of the last engine request."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Closed when the response was sent and the background generation has ended."""
    background: asyncio.Task[None] | None = None
    """Generation that continues after the response was sent."""
    abort_error: Callable[[], ApiError | None] = lambda: None
    """Returns the error with which the server aborts this request. None: a cancellation means that the client left."""
    start_s: float = field(default_factory=time.monotonic)
    start_ns: int = field(default_factory=time.time_ns)
    status: int = CLIENT_CLOSED_REQUEST
    seconds: float = 0.0
    """Time from the first header to the end of the response."""
    first_token_s: float | None = None
    """Time from the first header to the first token."""
    queue_s: float | None = None
    """Time that the last engine request waited for its first step."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    finish_reason: str = ""
    """Why generation ended: stop, length, abort or error."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and outputs."""
        return self.num_prompt_tokens + self.num_generated_tokens

    @property
    def engine_tenant(self) -> str:
        """The tenant by which the engine shares its capacity: the key's name and the request's `user`."""
        return (self.params.tenant if self.params is not None else "") or self.tenant

    def api_error(self, error: BaseException) -> ApiError:
        """The response to any exception, with the field names of this request's body."""
        return api_error(error, self.request_id, self.field_names)

    def end(self) -> None:
        """The response was sent, or there will be none."""
        at_end = self.at_end.pop_all()
        if self.background is None:
            at_end.close()
        else:
            self.background.add_done_callback(lambda _: at_end.close())

    def adopt_id(self, given: str | None) -> None:
        """Use the id given in a body, unless a header has one. Raises ApiError for an invalid id."""
        if given is None or self.is_named:
            return
        if not _is_valid_id(given):
            message = f"request_id must have 1 to {MAX_REQUEST_ID_LEN} printable ASCII characters, and no spaces"
            raise ApiError(400, message, param="request_id")
        self.request_id, self.is_named = given, True


def state_of(request: Request) -> ServerState:
    """The server that handles this request."""
    state: ServerState = request.app.state
    return state


def context_of(request: Request | Scope) -> RequestContext:
    """The context of this request."""
    scope = request.scope if isinstance(request, Request) else request
    context: RequestContext = scope[_CONTEXT]
    return context


def begin_request(scope: Scope) -> RequestContext:
    """The context of a request that has arrived: the outermost middleware creates it, the others find it."""
    if _CONTEXT not in scope:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        is_named = _is_valid_id(given)
        scope[_CONTEXT] = RequestContext(
            request_id=given if is_named else secrets.token_hex(12),
            is_named=is_named,
            method=scope["method"] if scope["method"] in _METHODS else "other",
            headers=scope["headers"],
            path=scope.get("path", "")[:MAX_LOGGED_PATH],
        )
    return context_of(scope)


def engine_id(response_id: str, place: int = 0) -> str:
    """A unique id for an engine request; clients may send the same request id again."""
    return f"{response_id}-{place}-{secrets.token_hex(4)}"


def _is_valid_id(request_id: str) -> bool:
    return 0 < len(request_id) <= MAX_REQUEST_ID_LEN and all("!" <= char <= "~" for char in request_id)
