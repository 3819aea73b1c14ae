"""The life of a server: responses while the model loads, deadlines of requests, admission, and draining at the end."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.common.memory import IDLE_S
from quire.server.http.errors import ApiError, protocol_path
from quire.server.http.state import context_of
from quire.server.operations.admission import MAX_RETRY_AFTER_S, Admission, tenant_of_address

PROBES = frozenset(["/health", "/ping", "/ready", "/metrics"])
_LOADING_RETRY_S = 2
_ABORT_S = 5.0


class LoadingApp:
    """The application that the HTTP server calls: it answers 503 while the model loads, then calls `app`."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call `app`, or answer 503 while there is none."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"retry-after": str(_LOADING_RETRY_S)}
            if scope["path"] in PROBES:
                await JSONResponse({"status": "loading"}, 503, headers)(scope, receive, send)
            else:
                error = ApiError(503, "the model is still loading; try again later", code="loading", headers=headers)
                await error.to_response(protocol_path(scope))(scope, receive, send)


class DrainGate:
    """Middleware that aborts requests: those that exceed their deadline, and all of them when the server stops.

    A POST is work: it has a deadline, draining waits for it, and none is accepted while draining. Any other request
    only reads: it has no deadline, as the live view needs, is accepted while draining, and is aborted by `close`.
    """

    def __init__(
        self, *, request_timeout_s: float | None, drain_timeout_s: float, on_idle: Callable[[], object] = lambda: None
    ) -> None:
        """`on_idle` is called when there has been no work for IDLE_S seconds."""
        self._on_idle = on_idle
        self._idle: asyncio.TimerHandle | None = None
        self._request_timeout_s = request_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._working: set[asyncio.Timeout] = set()
        self._reading: set[asyncio.Timeout] = set()
        self.num_working = 0
        """Requests that are work and have not ended."""
        self._no_work = asyncio.Event()
        self._no_work.set()
        self.is_draining = False
        self.is_closed = False

    def around(self, app: ASGIApp, *, has_deadline: bool = True) -> ASGIApp:
        """`app` with this middleware around it; without `has_deadline`, its work may take any time."""
        return partial(self._pass, app, self._request_timeout_s if has_deadline else None)

    async def drain(self) -> None:
        """Refuse new work, wait for running work up to the drain timeout, then abort it. Cancelling this call once ends
        the waiting; the rest is aborted at once."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._no_work.wait(), self._drain_timeout_s)
        _expire(self._working)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_work.wait(), _ABORT_S)

    def close(self) -> None:
        """Refuse all requests and abort those that only read."""
        self.is_draining = self.is_closed = True
        _expire(self._reading)

    async def _pass(self, app: ASGIApp, timeout_s: float | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Call `app` under a deadline. Raises ApiError: 503 while draining, 504 after the deadline. A response that has
        begun ends by itself: it finds the error in the request's context."""
        is_work = scope["method"] == "POST"
        if self.is_closed or (self.is_draining and is_work):
            retry_s = min(max(1, math.ceil(self._drain_timeout_s)), MAX_RETRY_AFTER_S)
            headers = {"retry-after": str(retry_s), "connection": "close"}
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)
        deadlines, has_begun = self._working if is_work else self._reading, False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        self._count(int(is_work))
        try:
            async with asyncio.timeout(timeout_s if is_work else None) as deadline:
                deadlines.add(deadline)
                context_of(scope).abort_error = lambda: self._abort_error() if deadline.expired() else None
                try:
                    await app(scope, receive, send_and_note)
                finally:
                    deadlines.discard(deadline)
        except TimeoutError:
            if not deadline.expired():
                raise
            if not has_begun:
                raise self._abort_error() from None
        finally:
            self._count(-int(is_work))

    def _count(self, change: int) -> None:
        self.num_working += change
        if self._idle is not None:
            self._idle.cancel()
        if self.num_working:
            self._no_work.clear()
        else:
            self._no_work.set()
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._on_idle)

    def _abort_error(self) -> ApiError:
        if self.is_draining:
            return ApiError(503, "the server is shutting down; the request was aborted", code="shutting_down")
        message = f"the request took longer than {self._request_timeout_s:g} s and was aborted"
        return ApiError(504, message, code="request_timeout")


def _expire(deadlines: Iterable[asyncio.Timeout]) -> None:
    for deadline in deadlines:
        if not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time())


class AdmissionControl:
    """Middleware around an endpoint that generates: a request starts only if Admission grants it."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint, if granted. Raises ApiError (429, with `Retry-After`)."""
        context = context_of(scope)
        tenant = context.tenant or tenant_of_address((scope.get("client") or ("local",))[0])
        refusal = self._admission.enter(tenant)
        if refusal is not None:
            headers = {"retry-after": str(refusal.retry_after_s)}
            message = f"{refusal.message}; try again in {refusal.retry_after_s} s"
            raise ApiError(429, message, code=refusal.reason, headers=headers)
        try:
            await self._app(scope, receive, send)
        finally:
            num_tokens = context.num_tokens
            self._admission.leave(tenant, num_tokens)
            if context.background is not None:
                context.background.add_done_callback(
                    lambda _: self._admission.charge(tenant, context.num_tokens - num_tokens)
                )
