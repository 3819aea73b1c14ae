"""The HTTP protocol with what uvicorn leaves open: a limit on headers, and on the time they take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class RefusedHeadError(Exception):
    """Stops the parser: the answer has been sent."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection. A request's head (request line and headers) that is too long or too slow is answered with 431 or
    408, and the connection closed."""

    max_header_bytes: int
    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._num_head_bytes = 0
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is due."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is due."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse. Where a head was being read before and after, all of `data` belongs to it."""
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self._is_refused:
            self._num_head_bytes += len(data)
            self._check_head(self._num_head_bytes)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """The head is there, and its true length known."""
        self._end_head()
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if not self._check_head(length):
            raise RefusedHeadError
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        if not self._is_refused:
            super().send_400_response(msg)

    def _begin_head(self) -> None:
        self._in_head, self._num_head_bytes = True, 0
        self._head_timer = self.loop.call_later(self.header_timeout_s, self._head_is_late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        message = f"the headers did not come within {self.header_timeout_s:g} s"
        self._refuse("408 Request Timeout", message)

    def _check_head(self, num_bytes: int) -> bool:
        if num_bytes > self.max_header_bytes:
            message = f"request line and headers are longer than {self.max_header_bytes:,} bytes"
            self._refuse("431 Request Header Fields Too Large", message)
        return not self._is_refused

    def _refuse(self, status: str, message: str) -> None:
        """Answer and close. Where an earlier request of the connection is still being answered, close only."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def limited_protocol(max_header_bytes: int, header_timeout_s: float) -> type[LimitedHttpProtocol]:
    """The protocol with these limits, as uvicorn takes it: a class."""
    limits = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), limits)
