"""How a body becomes a struct: what is refused, with which status and field, and which fields are unknown."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Annotated, Literal

import msgspec
import pytest
from starlette.requests import Request

from quire.server.http import bodies
from quire.server.http.bodies import MAX_NAMED_FIELDS, decode, read_struct, warning
from quire.server.http.errors import ApiError
from quire.server.http.state import begin_request, context_of


class Part(msgspec.Struct):
    kind: str
    more: "list[Part] | None" = None
    size: int | None = None


class Round(msgspec.Struct, tag="round"):
    size: Literal["small", "large"]


class Square(msgspec.Struct, tag="square"):
    size: Literal["large", "huge"]


class Body(msgspec.Struct, kw_only=True):
    name: str
    count: int | None = None
    a1: int | None = None
    part: Part | None = None
    parts: list[Part] | None = None
    anything: dict | None = None
    either: float | int | None = None
    renamed: Part | None = msgspec.field(default=None, name="schema")
    color: Literal["red", "green"] | Part | None = None
    colors: list[Literal["red", "green"]] | None = None
    by_name: dict[str, Literal["red", "green"]] | None = None
    shapes: list[Round | Square] | None = None
    short: dict[Annotated[str, msgspec.Meta(max_length=3)], int] | None = None


def refusal(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        decode(raw, Body)
    return raised.value


def test_a_body_becomes_a_struct():
    body, unknown = decode(b'{"name": "a", "count": -5, "part": {"kind": "b"}}', Body)
    assert body == Body(name="a", count=-5, part=Part("b"))
    assert unknown == []


def test_an_integer_may_be_written_as_a_float():
    raw = b'{"name": "a", "count": 8.0, "a1": 1e3, "either": 2.0, "anything": {"count": 8.0}, "part": {"kind": "b"'
    body, unknown = decode(raw + b', "size": 3.0}}', Body)
    assert (body.count, body.a1, body.part.size, unknown) == (8, 1000, 3, [])
    assert [type(number) for number in (body.count, body.part.size)] == [int, int]
    assert [type(number) for number in (body.either, body.anything["count"])] == [float, float]


@pytest.mark.parametrize(
    ("raw", "unknown"),
    [
        (b'{"name": "a", "nme": 1}', ["nme"]),
        (b'{"name": "a", "part": {"kind": "b", "x": 1}}', ["part.x"]),
        (
            b'{"name": "a", "parts": [{"kind": "b"}, {"kind": "c", "x": 1, "y": {}}]}',
            ["parts[1].x", "parts[1].y"],
        ),
        (b'{"name": "a", "part": {"kind": "b", "more": [{"kind": "c", "x": 1}]}}', ["part.more[0].x"]),
        (b'{"name": "a", "schema": {"kind": "b", "x": 1}, "renamed": 1}', ["schema.x", "renamed"]),
        (b'{"name": "a", "anything": {"x": {"y": 1}}, "parts": []}', []),
        (b'{"name": "a", "nme": null, "part": {"kind": "b", "x": null, "y": 0}}', ["part.y"]),
    ],
)
def test_unknown_fields_are_named_by_their_place(raw, unknown):
    assert decode(raw, Body)[1] == unknown


@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (b'{"name": 5}', "name: expected a string, got an integer", "name"),
        (b'{"name": "a", "count": 1.5}', "count: expected an integer or null, got a number", "count"),
        (b'{"name": "a", "count": 1e300}', "count: expected an integer or null, got a number", "count"),
        (b'{"name": "a", "part": {"kind": 5}}', "part.kind: expected a string, got an integer", "part.kind"),
        (b'{"name": "a", "parts": [{"kind": 5}]}', "parts[0].kind: expected a string, got an integer", "parts[0].kind"),
        (b'{"name": "a", "a1": 1.5}', "a1: expected an integer or null, got a number", "a1"),
        (b'{"name": "a", "short": {"long": 1}}', "short: a key: expected str of length <= 3", "short"),
        (
            b'{"name": "a", "color": true}',
            "color: expected a string, an object or null, got a boolean",
            "color",
        ),
        (b"{}", "name: this field is required", "name"),
        (b'{"name": "a", "part": {}}', "part.kind: this field is required", "part.kind"),
        (b"[]", "invalid body: expected an object, got an array", None),
        (b'{"name": "a", "color": "blue"}', "color: invalid enum value 'blue' (allowed: green, red)", "color"),
        (
            b'{"name": "a", "colors": ["red", "r"]}',
            "colors[1]: invalid enum value 'r' (allowed: green, red)",
            "colors[1]",
        ),
        (
            b'{"name": "a", "by_name": {"x.y]": "r"}}',
            "by_name[...]: invalid enum value 'r' (allowed: green, red)",
            "by_name[...]",
        ),
        (
            b'{"name": "a", "shapes": [{"type": "r"}]}',
            "shapes[0].type: invalid value 'r' (allowed: round, square)",
            "shapes[0].type",
        ),
        (
            b'{"name": "a", "shapes": [{"type": "round", "size": "huge"}]}',
            "shapes[0].size: invalid enum value 'huge' (allowed: huge, large, small)",
            "shapes[0].size",
        ),
    ],
)
def test_a_wrong_field_is_named_in_the_message_and_as_param(raw, message, param):
    error = refusal(raw)
    assert (error.status, error.message, error.param, error.code) == (400, message, param, None)


@pytest.mark.parametrize("raw", [b"", b"{", b'{"name": "\xff"}', b'{"name": "a"} x'])
def test_invalid_json_is_refused(raw):
    error = refusal(raw)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)
    assert "the body is not valid JSON in UTF-8: " in error.message


def test_half_a_surrogate_pair_is_not_called_a_missing_end():
    with pytest.raises(ApiError, match=r"it ends too early, or a \\u escape is half a surrogate pair$"):
        decode(rb'{"model":"\ud800"}', Body)


def test_a_body_that_is_nested_too_deeply_is_refused():
    error = refusal(b'{"name": ' + b"[" * 100_000)
    assert (error.status, error.code) == (400, "invalid_json")
    assert "nested too deeply" in error.message


@pytest.mark.parametrize(("number", "is_accepted"), [(2**63 - 1, True), (-(2**63), True), (2**63, False),
                                                  (-(2**63) - 1, False), (10**40, False)])  # fmt: skip
def test_numbers_have_at_most_64_bits(number, is_accepted):
    raw = f'{{"name": "a", "anything": {{"x": {number}}}}}'.encode()
    if is_accepted:
        assert decode(raw, Body)[0].anything == {"x": number}
    else:
        error = refusal(raw)
        assert (error.status, error.code) == (400, "invalid_json")
        assert f"the number {str(number)[:40]} does not fit into 64 bits" in error.message


def test_digits_in_a_string_are_no_number():
    assert decode(b'{"name": "' + b"9" * 50 + b'"}', Body)[0].name == "9" * 50


def test_a_field_that_occurs_twice_is_refused_at_any_depth():
    for raw in (b'{"name": "a", "name": "b"}', b'{"name": "a", "anything": {"x": 1, "name": 2, "name": 3}}'):
        error = refusal(raw)
        assert (error.status, error.param, error.code) == (400, "name", "duplicate_field")
        assert error.message == "the field 'name' occurs twice"
    long = b"x" * 200
    error = refusal(b'{"' + long + b'": 1, "' + long + b'": 2}')
    assert error.param == "x" * 100
    assert error.message == f"the field {'x' * 100!r} occurs twice"


@pytest.mark.parametrize(("mark", "num_others"), [(b",", 1), (b":", 3), (b"[", 0), (b"{", 2)])
def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(monkeypatch, mark, num_others):
    limit = 4
    monkeypatch.setattr(bodies, "MAX_MARKS", dict.fromkeys(bodies.MAX_MARKS, limit))
    raw = b'{"name": "%s", "anything": {"x": 1}}'
    most = mark * (limit - num_others)
    assert decode(raw % most, Body)[0].name == most.decode()
    error = refusal(raw % (most + mark))
    assert (error.status, error.code) == (413, "request_too_large")
    assert f"the body contains the character {mark.decode()!r} 5 times; at most 4 are allowed" in error.message


def test_at_most_ten_unknown_fields_are_named_in_the_warning():
    assert warning(["a", "b.c[0]"]) == "unknown fields ignored: a, b.c[0]"
    names = [f"f{number}" for number in range(MAX_NAMED_FIELDS)]
    assert warning(names) == f"unknown fields ignored: {', '.join(names)}"
    assert warning([*names, "x", "y"]) == f"unknown fields ignored: {', '.join(names)} and 2 more"


def test_the_warning_is_printable_and_short():
    assert warning(["a\r\nb", "é", "x" * 65]) == f"unknown fields ignored: a??b, ?, {'x' * 64}"


def test_the_decoder_is_as_strict_as_the_field_says():
    assert refusal(b'{"name": "a", "count": "5"}').param == "count"
    assert refusal(b'{"name": "a", "count": true}').param == "count"


LIMIT = 100


class Sending:
    """A client's request whose body arrives in these pieces, at a server that allows 100 bytes."""

    def __init__(self, *pieces: bytes, headers: dict[str, str] | None = None, max_body: int = LIMIT) -> None:
        self.state = SimpleNamespace(
            args=SimpleNamespace(max_body=max_body, body_timeout_s=60), num_body_bytes=0, num_values=0
        )
        self.num_received = 0
        self.held: list[int] = []
        self._pieces = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, start=1)
        ]
        self.scope = {
            "type": "http",
            "method": "POST",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "app": SimpleNamespace(state=self.state),
        }
        begin_request(self.scope)

    async def receive(self) -> dict:
        self.held.append(self.state.num_body_bytes)
        self.num_received += 1
        return self._pieces[self.num_received - 1]

    def read(self) -> Body:
        try:
            return asyncio.run(read_struct(Request(self.scope, self.receive), Body))
        finally:
            self.held.append(self.state.num_body_bytes)

    def refusal(self) -> ApiError:
        with pytest.raises(ApiError) as raised:
            self.read()
        return raised.value


def padded(num_bytes: int) -> bytes:
    return b'{"name": "a"}'.ljust(num_bytes)


@pytest.mark.parametrize(
    ("path", "headers", "is_accepted"),
    [
        ("/api/chat", {}, True),
        ("/api/chat", {"origin": "http://page"}, False),
        ("/v1/completions", {}, False),
        ("/v1/api/", {}, False),
    ],
)
def test_curl_needs_to_name_no_type_where_clients_of_ollama_call(path, headers, is_accepted):
    """A browser's form, which another site's page may send, has the same type and an origin."""
    sending = Sending(padded(20), headers={"content-type": "application/x-www-form-urlencoded"} | headers)
    sending.scope["path"] = path
    if is_accepted:
        assert sending.read().name == "a"
    else:
        assert sending.refusal().status == 415


def test_other_types_are_refused_of_clients_of_ollama_too():
    sending = Sending(padded(20), headers={"content-type": "text/plain"})
    sending.scope["path"] = "/api/chat"
    assert sending.refusal().status == 415


def test_the_bytes_of_a_body_count_only_while_it_is_read():
    sending = Sending(b'{"name":', b' "a", "nme": 1, ', b'"more": 2}')
    sending.state.num_body_bytes = 7
    context_of(sending.scope).unknown_fields = ["before"]
    assert sending.read() == Body(name="a")
    assert sending.held == [7, 15, 31, 7]
    assert context_of(sending.scope).unknown_fields == ["before", "nme", "more"]


def test_the_bytes_of_a_refused_body_no_longer_count():
    for sending in (Sending(b"nonsense"), Sending(padded(60), padded(60))):
        sending.refusal()
        assert sending.state.num_body_bytes == 0


@pytest.mark.parametrize(
    "headers",
    [{}, {"content-type": ""}, {"content-type": "application/json"}, {"content-type": "Application/JSON; charset=x"},
     {"content-type": "application/json", "origin": "http://page"},
     {"content-type": "application/vnd.api+json"}, {"content-encoding": " Identity "}, {"content-length": "100"},
     {"content-length": "many"}, {"content-length": "-1"}],
)  # fmt: skip
def test_bodies_of_json_are_read(headers):
    assert Sending(padded(20), headers=headers).read().name == "a"


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [({"content-type": "text/plain; charset=utf-8"}, 415, "content-type is 'text/plain'; it must be application/json"),
     ({"content-type": "json"}, 415, "content-type is 'json'"),
     ({"origin": "http://page"}, 415, "content-type is ''; it must be application/json"),
     ({"origin": "null", "content-type": ";"}, 415, "content-type is ''"),
     ({"content-type": "x" * 500}, 415, f"content-type is '{'x' * 100}'"),
     ({"content-encoding": "GZip"}, 415, "content-encoding is 'gzip'; send the body without an encoding"),
     ({"content-encoding": "x" * 500}, 415, f"content-encoding is '{'x' * 100}'"),
     ({"content-length": "101"}, 413, "the body is longer than the limit of 100 bytes"),
     ({"content-length": "0" * 18 + "1"}, 413, "the body is longer than the limit of 100 bytes")],
)  # fmt: skip
def test_a_body_with_wrong_headers_is_refused_unread(headers, status, message):
    sending = Sending(padded(20), headers=headers)
    error = sending.refusal()
    assert (error.status, sending.num_received) == (status, 0)
    assert message in error.message


def test_a_body_may_be_as_long_as_the_limit_in_one_piece_or_several():
    assert Sending(padded(LIMIT)).read().name == "a"
    assert Sending(padded(60), b" " * 40).read().name == "a"
    assert Sending(padded(20), headers={"content-length": "000000000000000020"}).read().name == "a"
    for num_read, pieces in enumerate(([padded(LIMIT + 1)], [padded(60), b" " * 41]), start=1):
        sending = Sending(*pieces, b" " * 10)
        error = sending.refusal()
        assert (error.status, error.code, error.headers) == (413, "request_too_large", {"connection": "close"})
        assert sending.num_received == num_read, "nothing behind the limit is read"


def test_large_bodies_are_refused_while_too_many_are_read_and_small_ones_are_not(monkeypatch):
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 50)
    for held, num_bytes, is_accepted in ((1540, 60, True), (1541, 60, False), (10**6, 50, True), (10**6, 51, False)):
        sending = Sending(padded(num_bytes))
        sending.state.num_body_bytes = held
        if is_accepted:
            assert sending.read().name == "a"
        else:
            error = sending.refusal()
            assert (error.status, error.code) == (429, "busy")
            assert error.headers == {"connection": "close", "retry-after": "5"}
            assert "too many large bodies are being received" in error.message
        assert sending.state.num_body_bytes == held


def test_a_large_body_is_decoded_in_a_thread(monkeypatch):
    seen = []

    def note(raw: bytearray, kind: type) -> tuple[str, list[str]]:
        seen.append((len(raw), kind, threading.current_thread() is threading.main_thread()))
        return "done", []

    monkeypatch.setattr(bodies, "decode", note)
    quick = bodies._QUICK_BYTES
    for num_bytes in (quick, quick + 1):
        assert Sending(padded(num_bytes), max_body=10**6).read() == "done"
    assert seen == [(quick, Body, True), (quick + 1, Body, False)]
