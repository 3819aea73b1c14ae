"""API keys: where they come from, and the response to a request without one."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.common.errors import ConfigError
from quire.server.config import ServerArgs
from quire.server.http.auth import (
    Administration,
    AllowedHosts,
    ApiKeys,
    Authentication,
    callers_are_one_tenant,
    checks_hosts,
)
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


def test_an_admin_key_that_is_also_an_api_key_is_refused(monkeypatch):
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "third")
    keys, admin_keys = ApiKeys.load_pair(ServerArgs(api_key=("first",), admin_key=("second",)))
    assert (keys.name_of(b"first"), keys.name_of(b"second"), len(admin_keys)) == ("key-1", None, 2)
    with pytest.raises(ConfigError, match="an admin key is also an API key"):
        ApiKeys.load_pair(ServerArgs(api_key=("first", "third"), admin_key=("second",)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("sk-topsecret\n", "line 1"), ("ok:k\n\na/b:sk-topsecret", "line 3"), ("a:\n", "empty"),
     ("a:sk-topsecret\nb:sk-topsecret", "two names"), (":sk-topsecret", "line 1")],
)  # fmt: skip
def test_a_wrong_key_file_is_refused_without_quoting_it(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        keys_of(tmp_path, text)
    assert "topsecret" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "\n# alice:retired\n"])
def test_a_key_file_without_keys_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"^api_key_file='.*/keys' has no keys"):
        keys_of(tmp_path, text)
    with pytest.raises(ConfigError, match=r"^admin_key_file='.*/keys' has no keys"):
        ApiKeys.load_admin(ServerArgs(admin_key_file=str(tmp_path / "keys")), {})


def test_a_missing_key_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^api_key_file='.*/none' cannot be read"):
        ApiKeys.load(ServerArgs(api_key_file=str(tmp_path / "none")), {})


def test_a_key_file_is_text_in_utf_8(tmp_path):
    (tmp_path / "keys").write_bytes(b"alice:\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(ServerArgs(api_key_file=str(tmp_path / "keys")), {})
    (tmp_path / "keys").write_bytes("bob:schl\u00fcssel".encode())
    keys = ApiKeys.load(ServerArgs(api_key_file=str(tmp_path / "keys")), {})
    assert keys.name_of("schl\u00fcssel".encode()) == "bob"


def test_names_of_keys_have_up_to_64_characters(tmp_path):
    assert keys_of(tmp_path, f"{'a' * 64}:k").name_of(b"k") == "a" * 64
    assert keys_of(tmp_path, "A.b_c-9:k").name_of(b"k") == "A.b_c-9"
    with pytest.raises(ConfigError, match=r"^api_key_file='.*/keys', line 1: must be name:key"):
        keys_of(tmp_path, f"{'a' * 65}:k")


@pytest.mark.parametrize("key", ["", " ", " k", "k "])
def test_a_key_that_is_empty_or_has_white_space_around_it_is_refused(key):
    with pytest.raises(ConfigError, match="the API key named 'key-2' is empty or has white space around it"):
        ApiKeys.load(ServerArgs(api_key=("good", key)), {})


def test_a_repeated_key_must_have_the_same_name(tmp_path):
    assert keys_of(tmp_path, "a:k\na:k\n").name_of(b"k") == "a"
    with pytest.raises(ConfigError, match="two names, 'key-1' and 'a'"):
        keys_of(tmp_path, "a:k", ("k",))
    with pytest.raises(ConfigError, match="two names, 'key-1' and 'key-2'"):
        ApiKeys.load(ServerArgs(api_key=("k",)), {"QUIRE_API_KEY": "k"})


def test_a_server_without_keys_has_an_empty_set_of_keys():
    assert not ApiKeys.load(ServerArgs(), {})
    assert not ApiKeys.load_admin(ServerArgs(), {})
    assert ApiKeys.load(ServerArgs(api_key=("k",)), {})
    assert not ApiKeys.load(ServerArgs(), {"QUIRE_API_KEY": " , "})


@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_key(key):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a", "sk-b")), {})
    assert (keys.name_of(key) is not None) == (key in (b"sk-a", b"sk-b"))


@pytest.mark.essential
@pytest.mark.parametrize(
    "headers",
    [[(b"authorization", b"Bearer sk-b")], [(b"authorization", b"bearer  sk-b ")], [(b"x-api-key", b"sk-b")],
     [(b"authorization", b"Bearer wrong"), (b"x-api-key", b"sk-b")]],
)  # fmt: skip
def test_a_key_opens_and_names_the_tenant(headers):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a", "sk-b")), {})
    context = call(Authentication(app, keys), *headers)
    assert context.tenant == "key-2"


@pytest.mark.essential
@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"sk-a")], [(b"authorization", b"Basic sk-a")],
     [(b"authorization", b"Digest sk-a")], [(b"x-other", b"Bearer sk-a")],
     [(b"x-api-key", b"")], [(b"x-api-key", b"sk-a\xff")], [(b"authorization", b"Bearer")]],
)  # fmt: skip
def test_without_a_key_the_answer_is_401(headers):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a",)), {})
    with pytest.raises(ApiError) as raised:
        call(Authentication(app, keys), *headers)
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert raised.value.headers == {"www-authenticate": "Bearer"}
    assert "this server requires an API key: send `Authorization: Bearer KEY`" in raised.value.message


@pytest.mark.parametrize("key", [b"", b"wrong"])
def test_the_answer_says_whether_a_key_was_sent(key):
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a",)), {})
    for guarded in (Authentication(app, keys), Administration(app, keys)):
        with pytest.raises(ApiError) as raised:
            call(guarded, (b"authorization", b"Bearer " + key))
        assert raised.value.message.endswith("; the key that was sent is not valid" if key else "`x-api-key: KEY`")


def test_the_first_of_two_valid_keys_names_the_tenant():
    keys = ApiKeys.load(ServerArgs(api_key=("sk-a", "sk-b")), {})
    context = call(Authentication(app, keys), (b"x-api-key", b"sk-b"), (b"authorization", b"Bearer sk-a"))
    assert context.tenant == "key-2"


def test_middleware_passes_its_arguments_on_unchanged():
    seen = []

    async def inner(*arguments):
        seen.append(arguments)

    receive, send = object(), object()
    scope = {"type": "http", "method": "GET", "headers": [(b"authorization", b"Bearer k"), (b"host", b"localhost")]}
    begin_request(scope)
    keys = ApiKeys.load(ServerArgs(api_key=("k",)), {})
    for middleware in (Authentication(inner, keys), Administration(inner, keys), AllowedHosts(inner, ())):
        asyncio.run(middleware(scope, receive, send))
    lifespan = {"type": "lifespan"}
    asyncio.run(AllowedHosts(inner, ())(lifespan, receive, send))
    assert seen == [(scope, receive, send)] * 3 + [(lifespan, receive, send)]


def test_both_shapes_of_the_answer():
    error = ApiError(401, "no", code="invalid_api_key")
    assert b'"code":"invalid_api_key"' in error.to_json("/v1/chat/completions")
    assert b'"authentication_error"' in error.to_json("/v1/messages")


@pytest.mark.parametrize(
    ("allowed", "host", "expected"),
    [((), b"localhost:8000", True), ((), b"127.0.0.1", True), ((), b"[::1]:8000", True),
     ((), b"evil.example:8000", False), ((), b"localhost.evil.example", False),
     (("API.example",), b"api.example:443", True), (("api.example",), b"localhost", False),
     (("api.example:443",), b"api.example:443", True), (("api.example:443",), b"api.example", False),
     (("api.example:443",), b"api.example:444", False)],
)  # fmt: skip
def test_requests_for_other_hosts_are_refused(allowed, host, expected):
    middleware = AllowedHosts(app, allowed)
    if expected:
        assert call(middleware, (b"host", host)) is not None
        return
    with pytest.raises(ApiError) as raised:
        call(middleware, (b"host", host))
    assert (raised.value.status, raised.value.code) == (403, "wrong_host")
    assert "requests for this host are refused; the operator can add it to allowed_hosts" in raised.value.message


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


def test_admin_keys_have_sources_of_their_own(tmp_path):
    path = tmp_path / "admins"
    path.write_text("root:toor\n")
    args = ServerArgs(admin_key=("boss",), admin_key_file=str(path), api_key=("client",))
    environ = {"QUIRE_ADMIN_KEY": "chief", "QUIRE_API_KEY": "other"}
    admins, keys = ApiKeys.load_admin(args, environ), ApiKeys.load(args, environ)
    assert [admins.name_of(key) for key in (b"boss", b"chief", b"toor")] == ["key-1", "key-2", "root"]
    assert [admins.name_of(key) for key in (b"client", b"other")] == [None, None]
    assert [keys.name_of(key) for key in (b"boss", b"chief", b"toor")] == [None, None, None]
    assert not admins.overlaps(keys)
    assert admins.overlaps(ApiKeys.load(ServerArgs(api_key=("toor",)), {}))
    path.write_text("topsecret\n")
    with pytest.raises(ConfigError, match=r"^admin_key_file=.*line 1") as raised:
        ApiKeys.load_admin(args, {})
    assert "topsecret" not in str(raised.value)
    with pytest.raises(ConfigError, match="the admin key named 'key-1' is empty"):
        ApiKeys.load_admin(ServerArgs(admin_key=("",)), {})


def test_keys_are_read_again_or_stay_as_they_were(tmp_path):
    clients, admins = tmp_path / "clients", tmp_path / "admins"
    clients.write_text("a:old\n")
    admins.write_text("root:toor\n")
    args = ServerArgs(api_key_file=str(clients), admin_key_file=str(admins))
    keys, admin_keys = ApiKeys.load_pair(args)
    keys.reload_pair(admin_keys, args)
    assert not keys.have_changed
    clients.write_text("b:new\n")
    for wrong in ("", "root:new\n"):  # no keys, and one that clients have
        admins.write_text(wrong)
        with pytest.raises(ConfigError):
            keys.reload_pair(admin_keys, args)
        assert (keys.name_of(b"old"), keys.name_of(b"new"), admin_keys.name_of(b"toor")) == ("a", None, "root")
    admins.write_text("root:later\n")
    keys.reload_pair(admin_keys, args)
    assert [keys.name_of(key) for key in (b"old", b"new")] == [None, "b"]
    assert [admin_keys.name_of(key) for key in (b"toor", b"later")] == [None, "root"]
    assert keys.have_changed


def test_administration_requires_a_key_and_that_there_is_one():
    nobody = Administration(app, ApiKeys(()))
    with pytest.raises(ApiError, match="has no admin key: start it with") as raised:
        call(nobody, (b"x-api-key", b""))
    assert (raised.value.status, raised.value.code) == (403, "admin_disabled")
    guarded = Administration(app, ApiKeys.load_admin(ServerArgs(admin_key=("boss",)), {}))
    for headers in ((), ((b"x-api-key", b"bos"),), ((b"authorization", b"Bearer Boss"),)):
        with pytest.raises(ApiError, match="requires an admin key") as raised:
            call(guarded, *headers)
        assert (raised.value.status, raised.value.code) == (401, "invalid_admin_key")
        assert raised.value.headers == {"www-authenticate": "Bearer"}
    assert call(guarded, (b"x-api-key", b"boss")).tenant == "key-1"


def test_callers_with_one_key_or_on_this_machine_without_keys_are_one_tenant():
    none, one, two = (ApiKeys.load(ServerArgs(api_key=keys), {}) for keys in ((), ("a",), ("a", "b")))
    assert [len(keys) for keys in (none, one, two)] == [0, 1, 2]
    for args, expected in (
        (ServerArgs(), [True, True, False]),
        (ServerArgs(host="0.0.0.0", allow_unauthenticated=True), [False, True, False]),
    ):
        assert [callers_are_one_tenant(args, keys) for keys in (none, one, two)] == expected
