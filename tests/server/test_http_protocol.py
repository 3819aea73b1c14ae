"""Request heads that are too long or too slow are answered and cut off."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.server.http.protocol import limited_protocol

LIMIT = 2048


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
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

    def abort(self) -> None:
        self.closed.set()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def app(scope, receive, send):
    """Tells of the request, the body last."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = b",".join(name for name, _ in scope["headers"])
    told = b"%b %b headers %b body %b" % (scope["method"].encode(), scope["raw_path"], names, body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


def connection(app, timeout_s: float = 60.0):
    config = Config(app, log_config=None, lifespan="off", ws="none", timeout_keep_alive=1)
    config.load()
    protocol = limited_protocol(LIMIT, timeout_s)(config=config, server_state=ServerState(), app_state={})
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


def talk(*pieces: bytes, timeout_s: float = 60.0, until_closed: bool = False) -> bytes:
    """What a connection answers to these pieces."""

    async def main() -> bytes:
        protocol, transport = connection(app, timeout_s)
        state = protocol.server_state
        for piece in pieces:
            if not transport.is_closing():
                protocol.data_received(piece)
            for _ in range(10):  # whatever can be done now
                await asyncio.sleep(0)
        if state.tasks and not transport.is_closing():
            await asyncio.wait(state.tasks)
        if until_closed:
            await asyncio.wait_for(transport.closed.wait(), 60)
        protocol.connection_lost(None)
        if state.tasks:
            await asyncio.wait(state.tasks)
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


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"GET / HTTP/1.1", 400), (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a", 400),
     (b"GET / HTTP/1.1\r\nHost: a\r\nx: y\r\nHOST: b", 400), (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b", 400),
     (b"POST / HTTP/1.1\r\ncontent-length: 0", 400), (b"GET / HTTP/1.1\r\nhost:", 200),
     (b"GET / HTTP/1.1\r\nhost: a", 200), (b"GET / HTTP/1.0", 200), (b"GET / HTTP/1.0\r\nhost: a", 200)],
)  # fmt: skip
def test_a_request_has_one_host(head, status):
    """RFC 9112, section 3.2. A second one could be meant for another server's checks."""
    answer = talk(head + b"\r\n\r\n", until_closed=status == 400)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 %d " % status) == 1
    assert (b"Host" in answer) == (status == 400)


def test_a_request_without_a_host_ends_the_connection():
    answer = talk(b"GET / HTTP/1.1\r\n\r\n" + get(), get(), until_closed=True)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"HTTP/1.1 200" not in answer


def test_a_large_body_does_not_count_as_the_head():
    body = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\n" + b"x" * 9000
    assert talk(body).startswith(b"HTTP/1.1 200")
    assert talk(body + get()).count(b"HTTP/1.1 200") >= 1
    assert talk(body[:5000], body[5000:], get()).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("text", [b"\x16\x03\x01\x02\x00\x01\x00", b"CONNECT a:1 HTTP/1.1\r\n\r\n", get(b"a: \x00")])
def test_malformed_http_is_400(text):
    answer = talk(text, until_closed=True)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error": {"message": ' in answer


def test_nonsense_behind_a_request_does_not_answer_it():
    assert talk(get() + b"nonsense\r\n\r\n", until_closed=True) == b""


CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def test_trailers_are_no_headers():
    """They come when the headers have been looked at, or in the same breath: nobody may be let in by them."""
    pieces = CHUNKED, b"2\r\nhi\r\n0\r\n", b"authorization: Bearer key\r\n", b"\r\n"
    for cut in (pieces, [b"".join(pieces)]):
        assert talk(*cut).endswith(b"POST / headers host,transfer-encoding body hi")


@pytest.mark.parametrize("start", [b"0\r\n", b"5;", b"0\r\na: ", b"2\r\nhi\r\n0\r\n"])
def test_endless_data_after_the_body_is_refused(start):
    answer = talk(
        CHUNKED + start, *[b"a:x\r\n" * 20 if start.endswith(b"0\r\n") else b"x" * 100] * 50, until_closed=True
    )
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_body_in_many_small_chunks_is_a_body():
    assert talk(CHUNKED, *[b"1\r\nx\r\n" * 20] * 100, b"0\r\n\r\n").endswith(b" body " + b"x" * 2000)


def test_two_thousand_offers_in_one_piece_are_ignored():
    offer = b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    answers = talk(offer * 2000 + get(b"connection: close"), until_closed=True)
    assert answers.count(b"GET /a headers") == 2000


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_another_protocol_that_is_offered_is_not_taken(protocol):
    """Java's HttpClient offers HTTP/2 with every request, the body right behind."""
    head = b"POST /a?b HTTP/1.1\r\nhost: a\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: " + protocol + b"\r\n"
    text = head + b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\ncontent-length: 5\r\n\r\nhello" + get()
    for pieces in ([text], [text[:60], text[60:90], text[90:]], [text[i : i + 1] for i in range(len(text))]):
        answer = talk(*pieces)
        assert b"POST /a headers host,connection,http2-settings,content-length body hello" in answer
        assert answer.endswith(b"GET / headers host body ")


def test_of_many_requests_at_once_few_are_added():
    async def main():
        protocol, transport = connection(app)
        for _ in range(200):
            if not transport.is_paused:
                protocol.data_received(get() * 20)
            await asyncio.sleep(0)
            assert len(protocol.pipeline) < 30
        while protocol.pipeline:
            await asyncio.sleep(0)
        protocol.connection_lost(None)

    asyncio.run(main())


@pytest.mark.parametrize("num_behind", [0, 1, 3])
def test_the_request_that_is_answered_learns_that_the_client_has_gone(num_behind):
    async def waiting(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async def main():
        protocol, transport = connection(waiting)
        protocol.data_received(get() * (1 + num_behind))
        (task,) = protocol.server_state.tasks
        await asyncio.sleep(0)
        assert not transport.is_paused
        protocol.connection_lost(None)
        await asyncio.wait_for(task, 60)

    asyncio.run(main())


def test_a_client_that_does_not_read_is_cut_off():
    async def main():
        protocol, transport = connection(app)
        protocol.timeout_keep_alive = 0.01
        protocol.pause_writing()
        protocol.resume_writing()
        await asyncio.sleep(0.03)
        assert not transport.is_closing()
        protocol.pause_writing()
        await asyncio.wait_for(transport.closed.wait(), 60)
        protocol.connection_lost(None)

    asyncio.run(main())


def test_empty_lines_do_not_keep_a_connection():
    async def main():
        protocol, transport = connection(app)
        protocol.data_received(get())
        await asyncio.wait(protocol.server_state.tasks)
        protocol.timeout_keep_alive = 0.01
        protocol.data_received(b"\r\n")
        await asyncio.wait_for(transport.closed.wait(), 60)
        protocol.connection_lost(None)

    asyncio.run(main())


@pytest.mark.essential
@settings(deadline=None)
@given(st.lists(st.integers(1, 80), max_size=20))
def test_however_a_request_is_cut_up_it_is_answered(cuts):
    text = get(b"a: " + b"x" * 200, b"content-length: 5") + b"hello"
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    assert talk(*[piece for piece in (*pieces, text[start:]) if piece]).startswith(b"HTTP/1.1 200")
