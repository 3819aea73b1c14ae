"""API keys: where they come from, and what a request without one is told."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.common.errors import ConfigError
from quire.server.config import ServerArgs
from quire.server.http.auth import AllowedHosts, ApiKeys, Authentication, checks_hosts
from quire.server.http.errors import ApiError
from quire.server.http.state import begin_request, context_of


def keys_of(tmp_path, text: str = "", api_key: tuple[str, ...] = (), environ=None) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(text)
    return ApiKeys.load(ServerArgs(api_key=api_key, api_key_file=str(path)), environ or {})


def call(middleware, *headers: tuple[bytes, bytes]):
    """The scope as the application behind the middleware got it; None if it did not."""
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": list(headers)}
    begin_request(scope)
    asyncio.run(middleware(scope, None, None))
    return scope.get("seen")


async def app(scope, receive, send):
    scope["seen"] = context_of(scope)


def test_keys_come_from_arguments_environment_and_file(tmp_path):
    keys = keys_of(
        tmp_path,
        "# a comment\n\nalice:a:b\nbob: secret\nalice:rotated\n",
        ("first",),
        {"QUIRE_API_KEY": "second, third"},
    )
    found = {
        key: keys.name_of(key) for key in (b"first", b"second", b"third", b"a:b", b"secret", b"rotated", b"none", b"")
    }
    assert found == {
        b"first": "key-1", b"second": "key-2", b"third": "key-3", b"a:b": "alice", b"secret": "bob",
        b"rotated": "alice", b"none": None, b"": None,
    }  # fmt: skip
    assert not ApiKeys.load(ServerArgs(), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [("sk-topsecret\n", "line 1"), ("ok:k\n\na/b:sk-topsecret", "line 3"), ("a:\n", "empty"),
     ("a:sk-topsecret\nb:sk-topsecret", "two names"), (":sk-topsecret", "line 1")],
)  # fmt: skip
def test_a_wrong_key_file_is_refused_without_quoting_it(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        keys_of(tmp_path, text)
    assert "topsecret" not in str(raised.value)


def test_a_missing_key_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(ServerArgs(api_key_file=str(tmp_path / "none")), {})


@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_key(key):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a", "sk-b")), {})
    assert (keys.name_of(key) is not None) == (key in (b"sk-a", b"sk-b"))


@pytest.mark.parametrize(
    "headers",
    [[(b"authorization", b"Bearer sk-b")], [(b"authorization", b"bearer  sk-b ")], [(b"x-api-key", b"sk-b")],
     [(b"authorization", b"Bearer wrong"), (b"x-api-key", b"sk-b")]],
)  # fmt: skip
def test_a_key_opens_and_names_the_tenant(headers):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a", "sk-b")), {})
    context = call(Authentication(app, keys), *headers)
    assert context.tenant == "key-2"


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"sk-a")], [(b"authorization", b"Basic sk-a")],
     [(b"x-api-key", b"")], [(b"x-api-key", b"sk-a\xff")], [(b"authorization", b"Bearer")]],
)  # fmt: skip
def test_without_a_key_the_answer_is_401(headers):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a",)), {})
    with pytest.raises(ApiError) as raised:
        call(Authentication(app, keys), *headers)
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert raised.value.headers["www-authenticate"] == "Bearer"


def test_both_shapes_of_the_answer():
    error = ApiError(401, "no", code="invalid_api_key")
    assert b'"code":"invalid_api_key"' in error.to_json("/v1/chat/completions")
    assert b'"authentication_error"' in error.to_json("/v1/messages")


@pytest.mark.parametrize(
    ("allowed", "host", "expected"),
    [((), b"localhost:8000", True), ((), b"127.0.0.1", True), ((), b"[::1]:8000", True),
     ((), b"evil.example:8000", False), ((), b"localhost.evil.example", False),
     (("API.example",), b"api.example:443", True), (("api.example",), b"localhost", False)],
)  # fmt: skip
def test_requests_for_other_hosts_are_refused(allowed, host, expected):
    middleware = AllowedHosts(app, allowed)
    if expected:
        assert call(middleware, (b"host", host)) is not None
        return
    with pytest.raises(ApiError) as raised:
        call(middleware, (b"host", host))
    assert raised.value.status == 403


def test_http_1_0_may_leave_the_host_out():
    assert call(AllowedHosts(app, ())) is not None


def test_hosts_are_checked_where_every_program_here_may_call():
    assert checks_hosts(ServerArgs(), has_keys=False)
    assert not checks_hosts(ServerArgs(), has_keys=True)
    assert not checks_hosts(ServerArgs(uds="/run/quire"), has_keys=False)
    assert not checks_hosts(ServerArgs(host="0.0.0.0", allow_unauthenticated=True), has_keys=False)
    assert not checks_hosts(ServerArgs(allowed_hosts=("*",)), has_keys=False)
    assert checks_hosts(ServerArgs(allowed_hosts=("a",), api_key=("k",)), has_keys=True)


def test_every_key_is_compared_whichever_it_is(monkeypatch):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a", "sk-b", "sk-c")), {})
    compared: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda given, known: compared.append(known) or given == known)
    for key in (b"sk-a", b"sk-c", b"nobody's"):
        compared.clear()
        keys.name_of(key)
        assert len(set(compared)) == 3
