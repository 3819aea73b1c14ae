"""The log of requests: one line for each, without the text of prompts and responses unless the operator asks for it."""

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.common.faults import fault_point
from quire.common.log import IN_MESSAGE, logger, plain
from quire.common.outputs import EngineStats, RequestMetrics
from quire.server.http.state import UNKNOWN_ROUTE, RequestContext, begin_request
from quire.server.operations.lifecycle import PROBES

MAX_LOGGED_BODY = 64 * 1024
_current: ContextVar[RequestContext] = ContextVar("quire_request")
"""The HTTP request that the running task handles."""


class EngineListener:
    """A RequestListener that adds what the engine reports to the HTTP requests that its requests belong to."""

    def __init__(self) -> None:
        self._contexts: dict[str, RequestContext] = {}

    def on_step(self, stats: EngineStats) -> None:
        """Ignored: a step is not part of one request."""

    def on_request_start(self, request_id: str, num_prompt_tokens: int, params: Any) -> None:
        """An engine request begins; called in the task that handles the HTTP request."""
        context = _current.get(None)
        if context is None:
            return
        self._contexts[request_id] = context
        context.num_prompt_tokens += num_prompt_tokens
        context.params = params

    def on_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """An engine request has generated tokens."""
        context = self._contexts.get(request_id)
        if context is not None:
            context.num_generated_tokens += num_tokens
            if context.first_token_s is None:
                context.first_token_s = now - context.start_s

    def on_request_end(
        self, request_id: str, metrics: RequestMetrics, num_cached_tokens: int, reason: str, longest: int
    ) -> None:
        """An engine request has ended."""
        context = self._contexts.pop(request_id, None)
        if context is None:
            return
        context.finish_reason = reason
        context.num_cached_tokens += num_cached_tokens
        if metrics.first_scheduled_time is not None:
            context.queue_s = max(0.0, metrics.first_scheduled_time - metrics.arrival_time)


class Observer:
    """The outermost middleware: passes each request's context to `sinks` when the response is complete."""

    def __init__(
        self, app: ASGIApp, sinks: Sequence[Callable[[RequestContext], None]], *, keep_bodies: bool = False
    ) -> None:
        self._app = app
        self._sinks = sinks
        self._keep_bodies = keep_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application and note status, time and, if wanted, the body."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        context = begin_request(scope)
        if self._keep_bodies:
            context.body = bytearray()

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
            fault_point("http.send", message["type"])
            await send(message)

        token = _current.set(context)
        try:
            await self._app(scope, _noting(receive, context.body), send_and_note)
        finally:
            _current.reset(token)
            context.seconds = time.monotonic() - context.start_s
            for sink in self._sinks:
                sink(context)


def _noting(receive: Receive, kept: bytearray | None) -> Receive:
    async def receive_and_note() -> Message:
        message = await receive()
        fault_point("http.receive", message["type"])
        if kept is not None and message["type"] == "http.request":
            kept.extend(message.get("body", b"")[: MAX_LOGGED_BODY - len(kept)])
        return message

    return receive_and_note


def log_request(context: RequestContext) -> None:
    """A sink that logs one line. Successful probes are left out."""
    if context.route in PROBES and context.status == 200:
        return
    fields: dict[str, Any] = {
        "request_id": context.request_id,
        "tenant": context.engine_tenant,
        "model": context.model,
        "prompt_tokens": context.num_prompt_tokens,
        "cached_tokens": context.num_cached_tokens,
        "generated_tokens": context.num_generated_tokens,
        "queue_s": context.queue_s,
        "first_token_s": context.first_token_s,
        "seconds": context.seconds,
        "reason": context.finish_reason,
    }
    if context.body is not None:
        fields["body"] = context.body.decode("utf-8", "replace")
    fields = {name: round(v, 4) if isinstance(v, float) else v for name, v in fields.items() if v or name == "seconds"}
    heading = {name: getattr(context, name) for name in IN_MESSAGE}
    if context.route != UNKNOWN_ROUTE:
        del heading["path"]  # the template says more, and can be counted
    shown = plain(heading.get("path", context.route))
    logger.info("%s %s %s", context.method, shown, context.status, extra={"fields": heading | fields})
