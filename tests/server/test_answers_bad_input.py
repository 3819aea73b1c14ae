"""Wrong bodies of /v1/responses and /v1/messages: each is a 4xx that says what is wrong, or served."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.api.messages.protocol import MessagesRequest
from quire.server.api.responses.protocol import ResponsesRequest
from tests.effort import examples
from tests.server.in_process import Answer, Server, saying

TYPES = [
    "message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "text", "tool_use",
    "tool_result", "thinking", "function", "json_schema", "auto", "tool", "enabled", "user", "assistant", "developer",
]  # fmt: skip
KEYS = [
    "type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "tool_use_id", "input",
    "schema", "format", "parameters", "input_schema", "summary", "thinking", "effort",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(TYPES), st.text(max_size=5), st.sampled_from(["\0", "{}", "resp_" + "0" * 32]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = saying("Hi.")
    yield made
    if made.state.responses is not None:
        made.state.responses.store.close()


def changed(start: dict[str, Any], body: type) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(body.__struct_fields__)  # type: ignore[attr-defined]
    more = st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3)
    return more.map(lambda fields: start | fields)


def check(answer: Answer, body: Any) -> None:
    assert answer.status in (200, 400, 404, 413), (answer.status, body, answer.body)
    if answer.status != 200:
        assert answer.json["error"]["message"], body


def quick(test: Any) -> Any:
    return settings(
        max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )(test)


@quick
@given(changed({"input": "Hi", "max_output_tokens": 5}, ResponsesRequest))
def test_any_fields_of_responses(server: Server, body: dict[str, Any]) -> None:
    check(server.post("/v1/responses", body), body)


@quick
@given(changed({"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}, MessagesRequest))
def test_any_fields_of_messages(server: Server, body: dict[str, Any]) -> None:
    check(server.post("/v1/messages", body), body)
    check(server.post("/v1/messages/count_tokens", body), body)


ITEMS = st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=5), max_size=3)


@quick
@given(ITEMS)
def test_any_items_and_blocks(server: Server, items: list[dict[str, Any]]) -> None:
    check(server.post("/v1/responses", {"input": items, "max_output_tokens": 5}), items)
    for role in ("user", "assistant"):
        body = {"max_tokens": 5, "messages": [{"role": role, "content": items}]}
        check(server.post("/v1/messages", body), body)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"input": "\\ud800"}', b'{"input": "\xff"}'])
def test_invalid_bodies(server: Server, path: str, raw: bytes) -> None:
    assert server.post(path, raw).status == 400


@pytest.mark.parametrize("name", ["x", "resp_" + "0" * 32, "resp_" + "0" * 31 + "\n", "é", "'; --", "a" * 5000])
def test_ids_of_nothing(server: Server, name: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = server.call(method, f"/v1/responses/{name}{rest}")
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "response_not_found")
