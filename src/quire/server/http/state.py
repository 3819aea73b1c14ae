"""What a handler is given: the server's state, and the context of the request it answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Scope

from quire.server.api.tools import ReasoningFormat, ToolFormat, choose_reasoning_format, choose_tool_format
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError, api_error

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM

MAX_REQUEST_ID_LEN = 128
_CONTEXT = "quire"
"""key of the request's context in the ASGI scope"""


@dataclass(kw_only=True)
class ServerState:
    """One server: its engine, its arguments and what it keeps. `request.app.state` is it.

    Handlers may change `num_in_flight`, `num_body_bytes`, `is_draining` and what `parts` hold; the rest stays as it was
    made.
    """

    llm: AsyncLLM
    args: ServerArgs
    model_names: tuple[str, ...]
    """names the model answers to, the first in answers"""
    tool_format: ToolFormat | None = field(init=False)
    """how the model writes tool calls; None: tools are only for the template"""
    reasoning_format: ReasoningFormat | None = field(init=False)
    """how the model marks its reasoning; None: it does not"""
    started: float = field(default_factory=time.time)
    num_in_flight: int = 0
    """requests that generate, now"""
    num_body_bytes: int = 0
    """of bodies that are being read"""
    is_draining: bool = False
    """no new requests are wanted: /ready says so"""
    parts: dict[str, Any] = field(default_factory=dict)
    """what other endpoints keep, by their module's name: the response store, metrics"""

    def __post_init__(self) -> None:
        templates = self.llm.tokenizer.chat_templates
        template = templates.get("tool_use") or templates.get("default")
        self.tool_format = choose_tool_format(self.args.tool_parser, template)
        self.reasoning_format = choose_reasoning_format(self.args.reasoning_parser, template)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for a model that is not served."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; there is {', '.join(self.model_names)}",
            param="model",
            code="model_not_found",
        )


@dataclass(kw_only=True)
class RequestContext:
    """One HTTP request, from its headers to the end of its answer: what middleware and handlers tell each other."""

    request_id: str
    """the client's own, or one drawn; in the answer's `x-request-id`"""
    arrival_time: float = field(default_factory=time.monotonic)
    tenant: str = ""
    """the API key's name, where there are keys"""
    unknown_fields: list[str] = field(default_factory=list)
    """of the body; told in `x-quire-warning`"""
    field_names: dict[str, str] = field(default_factory=dict)
    """what the body calls fields that errors name otherwise, such as `prompt`"""
    facts: dict[str, Any] = field(default_factory=dict)
    """what a log may tell of the request: model, counts of tokens; never text"""
    background: asyncio.Task[None] | None = None
    """generation that goes on after the answer"""
    is_named: bool = False
    """the client chose the id"""

    def api_error(self, error: BaseException) -> ApiError:
        """The answer to any exception, in the body's own terms."""
        return api_error(error, self.request_id, self.field_names)

    def adopt_id(self, given: str | None) -> None:
        """The id that stands in a body, unless a header has one. Raises ApiError for one that is not sane."""
        if given is None or self.is_named:
            return
        if not _is_sane(given):
            message = f"request_id must have 1 to {MAX_REQUEST_ID_LEN} printable ASCII characters, and no spaces"
            raise ApiError(400, message, param="request_id")
        self.request_id, self.is_named = given, True


def state_of(request: Request) -> ServerState:
    """The server that answers."""
    state: ServerState = request.app.state
    return state


def context_of(request: Request | Scope) -> RequestContext:
    """The context of the request that is answered."""
    scope = request.scope if isinstance(request, Request) else request
    context: RequestContext = scope[_CONTEXT]
    return context


def add_context(scope: Scope) -> RequestContext:
    """Begin a request."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    is_named = _is_sane(given)
    context = RequestContext(request_id=given if is_named else secrets.token_hex(12), is_named=is_named)
    scope[_CONTEXT] = context
    return context


def engine_id(answer_id: str, place: int = 0) -> str:
    """An id for the engine, which takes no two of the same: clients may send a request id again."""
    return f"{answer_id}-{place}-{secrets.token_hex(4)}"


def _is_sane(request_id: str) -> bool:
    return 0 < len(request_id) <= MAX_REQUEST_ID_LEN and all("!" <= char <= "~" for char in request_id)
