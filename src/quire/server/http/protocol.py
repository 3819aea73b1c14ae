"""uvicorn's HTTP protocol with more limits: the size of headers, the number of pipelined requests, and the time that a
client may take to send headers and to read responses."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_PIPELINED = 8
"""Requests of one connection that may wait for the response to an earlier one; further ones are not read meanwhile."""


class RefusedHeadError(Exception):
    """Stops the parser after a request was refused; the error response has been sent."""


class _Flow(FlowControl):
    """Flow control that resumes reading only if `may_read` allows it."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        """Resume reading from the transport."""
        if self._may_read():
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. A request's head, that is request line and headers, which is malformed, too slow or too long is
    answered with 400, 408 or 431, and the connection is closed. It is closed as well if the client does not read its
    responses, or sends more than the limit that is neither a head nor a body."""

    max_header_bytes: int
    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._num_bytes = 0  # received since the last head or piece of a body
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first head."""
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: len(self.pipeline) < MAX_PIPELINED)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers. uvicorn notifies the last request; the one that is being answered may be an earlier one."""
        self._end_head()
        self.resume_writing()
        if (cycle := self._answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what was received, and apply the limits."""
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError:
            self._refuse("400 Bad Request", "malformed HTTP request")
        self._check_head(self._num_bytes)
        if self.cycle is not None and self.cycle.response_complete and not self._in_head:
            self._wait_idle()

    def _parse(self, data: bytes) -> None:
        """Offers to upgrade to another protocol, as Java's HTTP client makes for HTTP/2, are ignored: the request is
        parsed again without the offer."""
        while True:
            try:
                return self.parser.feed_data(data)
            except HttpParserUpgrade as offer:
                headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                version = self.parser.get_http_version().encode()
                head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version, *headers, b"", b""]
                data = b"\r\n".join(head) + data[offer.args[0] :]

    def on_message_begin(self) -> None:
        """A request begins: start the timer for its head, unless it runs already."""
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers, which follow a body, are dropped because they were not checked."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: check its length, and that it has exactly one Host header (RFC 9112, section 3.2)."""
        if self._is_offer():
            return
        self._end_head()
        self._num_bytes = 0
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if not (self._check_head(length) and self._check_host()):
            raise RefusedHeadError
        super().on_headers_complete()
        self.flow.resume_reading()  # even if this request has to wait: it shows when the client disconnects

    def on_body(self, body: bytes) -> None:
        """A piece of the body was received."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request was received completely."""
        if not self._is_offer():
            self._num_bytes = 0
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """The client does not read its response: close the connection if it still does not after the idle timeout."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again: stop that timer."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _wait_idle(self) -> None:
        """Restart the idle timer: what was received was not a request and must not keep the connection open."""
        if not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_timer = self.loop.call_later(self.header_timeout_s, self._head_is_late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        message = f"the headers were not received within {self.header_timeout_s:g} s"
        self._refuse("408 Request Timeout", message)

    def _check_head(self, num_bytes: int) -> bool:
        if num_bytes > self.max_header_bytes:
            message = f"request line and headers are longer than {self.max_header_bytes:,} bytes"
            self._refuse("431 Request Header Fields Too Large", message)
        return not self._is_refused

    def _check_host(self) -> bool:
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse("400 Bad Request", f"the request has {num_hosts} Host headers, it must have exactly one")
        return not self._is_refused

    def _refuse(self, status: str, message: str) -> None:
        """Send an error response and close the connection. While another response is being sent, only close it."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused, cycle = True, self._answering
        if cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started):
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def limited_protocol(max_header_bytes: int, header_timeout_s: float) -> type[LimitedHttpProtocol]:
    """A protocol class with these limits, to be passed to uvicorn."""
    limits = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), limits)
