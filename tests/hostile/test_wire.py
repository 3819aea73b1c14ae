"""What is no request, or never becomes one: refused, cut off, and nothing is kept of it."""

import contextlib
import json
import random
import socket
import struct
import threading
import time

import pytest

from tests.hostile.target import CANARY, COMPLETIONS, PATIENCE, Target

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a-key-for-tests\r\n"
JSON = HEAD + b"content-type: application/json\r\n"
CHUNKED = JSON + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
GOOD = b'{"prompt": "a", "max_tokens": 1}'


def sized(body: bytes, length: object = None) -> bytes:
    return JSON + b"content-length: %b\r\n\r\n" % str(len(body) if length is None else length).encode() + body


NONSENSE: dict[str, tuple[list[bytes], tuple[int, ...]]] = {
    "nothing at all": ([], (0, 408)),
    "random bytes": ([random.Random(1).randbytes(5000)], (400,)),
    "NULs": ([bytes(5000)], (400,)),
    "a TLS hello": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)], (400,)),
    "HTTP/0.9": ([b"GET /\r\n"], (0, 400, 408)),
    "HTTP/2": ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50)], (400,)),
    "HTTP/9.9": ([b"GET / HTTP/9.9\r\nhost: a\r\n\r\n"], (400,)),
    "a method that is none": ([b"A" * 1000 + b" / HTTP/1.1\r\n\r\n"], (400,)),
    "CONNECT": ([b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"], (400,)),
    "an endless request line": ([b"GET /", *[b"x" * 4096] * 40], (0, 431)),
    "an endless header": ([GET + b"a: ", *[b"x" * 4096] * 40], (0, 431)),
    "10,000 headers": ([GET + b"".join(b"a%d: b\r\n" % i for i in range(10_000)) + b"\r\n"], (0, 431)),
    "a header in continuation lines": ([GET + b"a: b\r\n" + b" x\r\n" * 50 + b"\r\n"], (200, 400)),
    "a header name of control characters": ([GET + b"\x01\x02: a\r\n\r\n"], (400,)),
    "a header with a NUL": ([GET + b"a: b\0c\r\n\r\n"], (400,)),
    "a header in no charset": ([GET + b"a: \xff\xfe\xed\xa0\x80\r\n\r\n"], (200,)),
    "a path in no charset": ([b"GET /\xff\xfe%ff%00%c0%af HTTP/1.1\r\nhost: a\r\n\r\n"], (400, 404)),
    "a path that climbs": ([b"GET /page/../../../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n"], (404,)),
    "a path that climbs in escapes": ([b"GET /page/%2e%2e%2f%2e%2e%2fetc HTTP/1.1\r\nhost: a\r\n\r\n"], (404,)),
    "an address of its own": ([b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n"], (200, 404)),
    "headers that do not end": ([GET], (408,)),
    "a body that does not come": ([JSON + b"content-length: 100\r\n\r\n"], (408,)),
    "half a body": ([sized(GOOD[:10], len(GOOD))], (408,)),
    "more than is allowed": ([sized(GOOD, 10**9)], (413,)),
    "a length beyond every number": ([sized(GOOD, "9" * 40)], (400, 413)),
    "a length below zero": ([sized(GOOD, -5)], (400,)),
    "a length that is none": ([sized(GOOD, "0x20")], (400,)),
    "two lengths": ([JSON + b"content-length: 32\r\ncontent-length: 5\r\n\r\n" + GOOD], (400,)),
    "a length and chunks": ([JSON + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], (400,)),
    "chunks that are none": ([CHUNKED + b"zz\r\nhi\r\n0\r\n\r\n"], (400,)),
    "a chunk beyond every number": ([CHUNKED + b"f" * 17 + b"\r\n"], (400,)),
    "a chunk of all memory": ([CHUNKED + b"7fffffffffffffff\r\n" + b"x" * 10_000], (408,)),
    "endless chunk extensions": ([CHUNKED + b"5;", *[b"x" * 4096] * 40], (0, 408, 431)),
    "endless trailers": ([CHUNKED + b"0\r\n", *[b"a: " + b"x" * 4096 + b"\r\n"] * 400], (0, 431)),
    "no UTF-8": ([sized(b'{"prompt": "\xff\xfe", "max_tokens": 1}')], (400,)),
    "half a character": ([sized(b'{"prompt": "\xe2\x82", "max_tokens": 1}')], (400,)),
    "UTF-16": ([sized(GOOD.decode().encode("utf-16"))], (400,)),
    "a byte order mark": ([sized(b"\xef\xbb\xbf" + GOOD)], (400,)),
    "a body in gzip": ([JSON + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00"], (415,)),
    "a form": ([HEAD + b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 3\r\n\r\n--x"], (415,)),
}  # fmt: skip
SLOW = [
    "headers that do not end", "a body that does not come", "half a body", "a chunk of all memory", "nothing at all",
    "endless chunk extensions", "HTTP/0.9",
]  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.thorough] if name in SLOW[1:] else []) for name in NONSENSE
])  # fmt: skip
def test_invalid_requests(guarded: Target, name: str):
    pieces, statuses = NONSENSE[name]
    limit_s = (4 if name in SLOW else 2) * PATIENCE
    reply = guarded.say(*pieces, limit_s=limit_s)
    assert reply.status in statuses, reply
    if reply.status >= 400:
        assert json.loads(reply.body)["error"]["message"]
    assert reply.seconds < limit_s


def test_slow_loris(guarded: Target):
    """A hundred connections that send a header's byte now and then, and as many with a body's."""
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        host, port = guarded.address.rsplit(":", 1)
        connections = [stack.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(200)]
        for number, connection in enumerate(connections):
            connection.sendall(GET if number % 2 else JSON + b"content-length: 1000\r\n\r\n")
        left = set(connections)
        while left and time.monotonic() < began_s + 5 * PATIENCE:
            for connection in list(left):
                try:
                    connection.sendall(b"x")
                except OSError:
                    left.discard(connection)
            time.sleep(0.2)  # as an attacker does
        assert not left, f"{len(left)} connections are kept"


def test_a_body_in_chunks_without_end(guarded: Target):
    """Nothing of it is kept beyond the limit."""
    host, port = guarded.address.rsplit(":", 1)
    chunk, num_sent = b"100000\r\n" + b" " * 2**20 + b"\r\n", 0
    with socket.create_connection((host, int(port)), 30) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(CHUNKED)
        while num_sent < 200:
            connection.sendall(chunk)
            num_sent += 1
    assert 20 < num_sent < 200


def test_connections_that_say_nothing(guarded: Target):
    host, port = guarded.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection((host, int(port)), 30)) for _ in range(400)]
        assert all(connection.recv(16).startswith(b"HTTP/1.1 408") for connection in connections)


def test_a_thousand_requests_at_once_on_one_connection(guarded: Target):
    host, port = guarded.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 30) as connection:
        sender = threading.Thread(target=connection.sendall, args=((GET + b"\r\n") * 1000,))
        sender.start()
        got = b""
        while got.count(b"HTTP/1.1 200") < 1000:
            chunk = connection.recv(65536)
            assert chunk, f"only {got.count(b'HTTP/1.1 200')} were answered"
            got += chunk
        sender.join()


LONG = json.dumps(CANARY | {"max_tokens": 1900, "temperature": 1, "logprobs": 20}).encode()


def test_clients_that_leave_in_the_middle(guarded: Target):
    """By resets, a part of them once tokens have come."""
    host, port = guarded.address.rsplit(":", 1)
    for number in range(60):
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(sized(LONG))
            if number % 3 == 0:
                connection.recv(100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("num", [2, pytest.param(12, marks=pytest.mark.thorough)])
def test_clients_that_read_nothing(guarded: Target, num: int):
    """They are cut off, or their answers are kept for them by the system, while they hold on."""
    host, port = guarded.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            connection = stack.enter_context(socket.create_connection((host, int(port)), 30))
            connection.sendall(sized(LONG))
        guarded.settle(of_files=False)


@pytest.mark.parametrize(
    "what",
    [
        b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "temperature": 1e999999999}', b'{"prompt": "\\ud800"}',
        b"[" * 1_000_000, b'{"a":' * 200_000, b'{"prompt": "a", "x": ' + b"9" * 1_000_000 + b"}",
        b'{"prompt": "a", "x": [' + b"0," * 1_100_000 + b"0]}", b'{"prompt": "' + b"\\u0000" * 500_000 + b'"}',
        b'{"prompt": "' + b"a" * 31_000_000 + b'"}', b" " * 3_000_000 + GOOD[:-1], b'"' + b"\\" * 1_000_001,
        b'{"prompt": "a", ' + b", ".join(b'"%d": 0' % i for i in range(199_000)) + b', "max_tokens": 0.5}',
        b'{"prompt": "a", "x": "' + b'"", "' * 100_000 + b'"}',
    ],
    ids=["a field twice", "1e999999999", "a lone surrogate", "a million brackets", "200,000 objects",
         "a number of a million digits", "a million items", "escapes", "31 MB of text", "3 MB of blanks", "backslashes",
         "199,000 fields", "quotes"],
)  # fmt: skip
def test_bodies_that_are_hard_to_read(guarded: Target, what: bytes):
    reply = guarded.post(COMPLETIONS, what)
    assert reply.status in (400, 413), reply
    assert reply.message
    assert reply.seconds < 2 * PATIENCE
