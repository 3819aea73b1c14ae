"""The application: routes made from a table, and what the outermost layer adds to each response."""

import asyncio
import json
from typing import Any

import pytest
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from quire.server.app import make_app
from quire.server.http.endpoint import Endpoint
from quire.server.http.errors import ApiError
from quire.server.http.state import context_of


async def text(request: Request) -> PlainTextResponse:
    body = (await request.body()).decode()
    return PlainTextResponse(f"{request.method} {body} by {request.app.state.name}")


async def surplus(request: Request) -> PlainTextResponse:
    context_of(request).unknown_fields = ["mood", "tone"]
    return PlainTextResponse("")


async def refusing(request: Request) -> PlainTextResponse:
    raise ApiError(418, "no coffee", param="pot", headers={"retry-after": "5"})


async def failing(request: Request) -> PlainTextResponse:
    raise KeyError("insides")


ROWS = (
    Endpoint("/things", "GET", text, "List the things"),
    Endpoint("/things", "POST", text, "Make a thing"),
    Endpoint("/surplus", "GET", surplus, "Ignore fields"),
    Endpoint("/refusing", "GET", refusing, "Refuse"),
    Endpoint("/v1/messages", "GET", surplus, "Answer as Anthropic does"),
    Endpoint("/v1/messages/refusing", "GET", refusing, "Refuse as Anthropic does"),
    Endpoint("/failing", "GET", failing, "Fail"),
)


class State:
    """What the endpoints need of a server's state."""

    name = "the server"
    num_in_flight = 0


def call(method: str, path: str, request_id: str = "my-id", **options: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the response."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"this", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "root_path": "", "query_string": b"",
        "headers": [(b"x-request-id", request_id.encode())],
    }  # fmt: skip
    asyncio.run(make_app(State(), routes=ROWS, **options)(scope, receive, send))  # type: ignore[arg-type]
    start, *rest = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(message.get("body", b"") for message in rest)


def test_each_row_is_served_with_the_state_of_the_server():
    assert call("GET", "/things")[::2] == (200, b"GET this by the server")
    assert call("POST", "/things")[::2] == (200, b"POST this by the server")


def test_the_table_is_described_at_openapi_json():
    status, _, body = call("GET", "/openapi.json")
    assert status == 200
    assert set(json.loads(body)["paths"]) == {*(row.path for row in ROWS), "/openapi.json"}


@pytest.mark.parametrize("path", ["/things", "/nothing", "/refusing", "/failing"])
def test_every_response_has_the_id_of_its_request(path):
    headers = call("GET", path)[1]
    assert headers["x-request-id"] == "my-id"
    assert "request-id" not in headers
    assert "x-quire-warning" not in headers


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/refusing", "/v1/messages/nothing"])
def test_clients_of_anthropic_find_the_id_under_their_own_name_too(path):
    headers = call("GET", path)[1]
    assert (headers["x-request-id"], headers["request-id"]) == ("my-id", "my-id")


def test_ignored_fields_are_named_in_a_header():
    assert call("GET", "/surplus")[1]["x-quire-warning"] == "unknown fields ignored: mood, tone"


def test_an_error_of_an_endpoint_is_a_response_in_the_format_of_its_path():
    status, headers, body = call("GET", "/refusing")
    assert (status, headers["retry-after"], json.loads(body)["error"]["param"]) == (418, "5", "pot")
    anthropic = json.loads(call("GET", "/v1/messages/refusing")[2])
    assert (anthropic["type"], anthropic["request_id"]) == ("error", "my-id")
    status, _, body = call("GET", "/failing")
    assert status == 500
    assert b"insides" not in body
    assert b"my-id" in body


@pytest.mark.parametrize("path", ["/nothing", "/things/", "/"])
def test_an_unknown_path_is_a_404(path):
    status, _, body = call("GET", path)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (404, "not_found")
    assert repr(path) in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("DELETE", "/things", "GET, HEAD, POST"), ("POST", "/surplus", "GET, HEAD")]
)
def test_a_wrong_method_is_a_405_that_lists_all_methods_of_the_path(method, path, allowed):
    status, headers, body = call(method, path)
    error = json.loads(body)["error"]
    assert (status, headers["allow"], error["code"]) == (405, allowed, "method_not_allowed")
    assert error["message"] == f"{path!r} does not support the method {method}"


class NoPosts:
    """Middleware of one endpoint, which refuses its requests if their method is POST."""

    def __init__(self, app, row):
        self.app, self.row = app, row

    async def __call__(self, scope, receive, send):
        if self.row.method == "POST":
            raise ApiError(403, f"{self.row.summary}: no")
        await self.app(scope, receive, send)


def test_each_endpoint_can_be_wrapped_with_its_row():
    wrapped = []

    def wrap(app, row):
        wrapped.append((row.path, row.method))
        return NoPosts(app, row)

    assert call("GET", "/things", wrap=wrap)[0] == 200
    assert wrapped == [*((row.path, row.method) for row in ROWS), ("/openapi.json", "GET")]
    status, _, body = call("POST", "/things", wrap=wrap)
    assert (status, json.loads(body)["error"]["message"]) == (403, "Make a thing: no")


def test_middleware_is_around_all_paths_and_sees_the_context_of_the_request():
    seen = []

    class Watching:
        def __init__(self, app, name):
            self.app, self.name = app, name

        async def __call__(self, scope, receive, send):
            seen.append((self.name, context_of(scope).request_id))
            await self.app(scope, receive, send)

    around = [Middleware(Watching, "outer"), Middleware(Watching, "inner")]
    assert call("GET", "/nothing", around=around)[0] == 404
    assert seen == [("outer", "my-id"), ("inner", "my-id")]


def test_the_start_and_the_end_of_the_server_go_through():
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent = []

    async def receive():
        return events.pop(0)

    async def send(message):
        sent.append(message["type"])

    asyncio.run(make_app(State(), routes=ROWS)({"type": "lifespan", "state": {}}, receive, send))  # type: ignore[arg-type]
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
