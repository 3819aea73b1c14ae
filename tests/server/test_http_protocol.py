"""Request heads that are too long or too slow are answered and cut off."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.server.http_protocol import limited_protocol

LIMIT = 2048


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()

    def write(self, data) -> None:
        if not self.closed.is_set():
            self.written += data

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def get_extra_info(self, name, default=None):
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def talk(*pieces: bytes, timeout_s: float = 60.0, until_closed: bool = False) -> bytes:
    """What a connection answers to these pieces."""

    async def main() -> bytes:
        config = Config(app, log_config=None, lifespan="off", ws="none")
        config.load()
        state = ServerState()
        protocol = limited_protocol(LIMIT, timeout_s)(config=config, server_state=state, app_state={})
        transport = Transport()
        protocol.connection_made(transport)
        for piece in pieces:
            if not transport.is_closing():
                protocol.data_received(piece)
            for _ in range(10):  # whatever can be done now
                await asyncio.sleep(0)
        if state.tasks:
            await asyncio.wait(state.tasks)
        if until_closed:
            await asyncio.wait_for(transport.closed.wait(), 10)
        protocol.connection_lost(None)
        protocol._unset_keepalive_if_required()
        return transport.written

    return asyncio.run(main())


def get(*headers: bytes) -> bytes:
    return b"GET / HTTP/1.1\r\nhost: a\r\n" + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


def test_a_plain_request_is_answered():
    assert talk(get()).startswith(b"HTTP/1.1 200")
    assert talk(get(b"a: " + b"x" * 1000)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "pieces",
    [
        [get(b"a: " + b"x" * LIMIT)],
        [get(*[b"a%d: x" % number for number in range(300)])],
        [b"GET /" + b"x" * LIMIT + b" HTTP/1.1\r\nhost: a\r\n\r\n"],
        [b"GET / HTTP/1.1\r\na: ", *[b"x" * 100] * 50],
        [b"GET / HTTP/1.1\r\n", *[b"a: x\r\n"] * 500],
        [b"GET /", *[b"x" * 100] * 50],
    ],
)
def test_a_head_that_is_too_long_is_refused(pieces):
    answer = talk(*pieces, until_closed=True)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"longer than 2,048 bytes" in answer


def test_a_head_that_does_not_end_is_refused():
    answer = talk(b"GET / HTTP/1.1\r\nhost:", timeout_s=0.01, until_closed=True)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert talk(timeout_s=0.01, until_closed=True).startswith(b"HTTP/1.1 408 ")


def test_the_second_request_of_a_connection_is_timed_too():
    answer = talk(get(), b"GET / HTTP/1.1\r\nhost:", timeout_s=0.01, until_closed=True)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408 " in answer


def test_a_large_body_is_no_head():
    body = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\n" + b"x" * 9000
    assert talk(body).startswith(b"HTTP/1.1 200")
    assert talk(body + get()).count(b"HTTP/1.1 200") >= 1
    assert talk(body[:5000], body[5000:], get()).count(b"HTTP/1.1 200") == 2


def test_what_is_no_http_is_400():
    assert talk(b"\x16\x03\x01\x02\x00\x01\x00", until_closed=True).startswith(b"HTTP/1.1 400")


@settings(deadline=None)
@given(st.lists(st.integers(1, 80), max_size=20))
def test_however_a_request_is_cut_up_it_is_answered(cuts):
    text = get(b"a: " + b"x" * 200, b"content-length: 5") + b"hello"
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    assert talk(*[piece for piece in (*pieces, text[start:]) if piece]).startswith(b"HTTP/1.1 200")
