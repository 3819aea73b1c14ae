"""One line in the log per request. What is said in prompts and answers is not in it unless asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.common.faults import fault_point
from quire.common.log import IN_MESSAGE, logger
from quire.common.outputs import EngineStats, RequestMetrics
from quire.server.http.state import context_of

MAX_LOGGED_BODY = 64 * 1024
CLIENT_GONE = 499
"""status of a request whose client went before there was an answer; nginx's number"""
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
_QUIET = frozenset(["/health", "/ready", "/metrics"])


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request: filled in as it goes on, told to the sinks at its end."""

    method: str
    """`other` if HTTP has none of that name"""
    headers: list[tuple[bytes, bytes]]
    route: str = "other"
    """the template of its path, if there is an endpoint: a bounded set of values"""
    start_s: float = field(default_factory=time.monotonic)
    start_ns: int = field(default_factory=time.time_ns)
    status: int = CLIENT_GONE
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: float | None = None
    """from the request's arrival"""
    queue_s: float | None = None
    seconds: float = 0.0
    request_id: str = ""
    tenant: str = ""
    model: str = ""
    reason: str = ""
    """why its generation ended: stop, length, abort or error"""
    params: Any = None
    body: bytearray | None = None
    """its beginning, if bodies are to be logged"""

    @property
    def num_tokens(self) -> int:
        """Of prompts and outputs."""
        return self.num_prompt_tokens + self.num_generated_tokens


_current: ContextVar[RequestRecord] = ContextVar("quire_request")


def current_record() -> RequestRecord | None:
    """The record of the HTTP request that the running task answers."""
    return _current.get(None)


class RecordListener:
    """A RequestListener: adds what the engine says of its requests to the records of the HTTP requests they are of."""

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}

    def on_step(self, stats: EngineStats) -> None:
        """Nothing of a request's."""

    def on_request_start(self, request_id: str, num_prompt_tokens: int, params: Any) -> None:
        """Called in the task that answers the HTTP request."""
        record = _current.get(None)
        if record is None:
            return
        self._records[request_id] = record
        record.num_prompt_tokens += num_prompt_tokens
        record.tenant = getattr(params, "tenant", "") or record.tenant
        record.params = params

    def on_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """Tokens have come."""
        record = self._records.get(request_id)
        if record is not None:
            record.num_generated_tokens += num_tokens
            if record.first_token_s is None:
                record.first_token_s = now - record.start_s

    def on_request_end(self, request_id: str, metrics: RequestMetrics, num_cached_tokens: int, reason: str) -> None:
        """No more will."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        record.reason = reason
        record.num_cached_tokens += num_cached_tokens
        if metrics.first_scheduled_time is not None:
            record.queue_s = max(0.0, metrics.first_scheduled_time - metrics.arrival_time)


class Observer:
    """Middleware, the outermost: keeps a record of each request and gives it to the sinks once the answer is out."""

    def __init__(
        self, app: ASGIApp, sinks: Sequence[Callable[[RequestRecord], None]], *, keep_bodies: bool = False
    ) -> None:
        self._app = app
        self._sinks = sinks
        self._keep_bodies = keep_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on, and watch."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        record = RequestRecord(method, scope["headers"], body=bytearray() if self._keep_bodies else None)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            fault_point("http.send", message["type"])
            await send(message)

        token = _current.set(record)
        try:
            await self._app(scope, _noting(receive, record), send_and_note)
        finally:
            _current.reset(token)
            record.seconds = time.monotonic() - record.start_s
            if "app" in scope:  # else nobody has begun a context
                context = context_of(scope)
                record.request_id, record.tenant = context.request_id, record.tenant or context.tenant
                record.model = str(context.facts.get("model", ""))
            for sink in self._sinks:
                sink(record)


class NamedRoute:
    """Around an endpoint: tells the record which it is."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on."""
        if (record := _current.get(None)) is not None:
            record.route = self._path
        await self._app(scope, receive, send)


def _noting(receive: Receive, record: RequestRecord) -> Receive:
    kept = record.body

    async def receive_and_note() -> Message:
        message = await receive()
        fault_point("http.receive", message["type"])
        if kept is not None and message["type"] == "http.request":
            kept.extend(message.get("body", b"")[: MAX_LOGGED_BODY - len(kept)])
        return message

    return receive_and_note


def log_request(record: RequestRecord) -> None:
    """A sink: one line. Probes that went well are left out."""
    if record.route in _QUIET and record.status == 200:
        return
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "generated_tokens": record.num_generated_tokens,
        "queue_s": record.queue_s,
        "first_token_s": record.first_token_s,
        "seconds": record.seconds,
        "reason": record.reason,
    }
    if record.body is not None:
        fields["body"] = record.body.decode("utf-8", "replace")
    fields = {name: round(v, 4) if isinstance(v, float) else v for name, v in fields.items() if v or name == "seconds"}
    heading = {name: getattr(record, name) for name in IN_MESSAGE}
    logger.info("%s %s %s", *heading.values(), extra={"fields": heading | fields})
