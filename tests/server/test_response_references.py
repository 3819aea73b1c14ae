"""Items of `/v1/responses` that are named instead of repeated, and prompts that are counted before they are sent."""

import asyncio
import json
from typing import Any

import pytest

from quire.server.api.responses import references
from quire.server.api.responses.endpoint import stored_responses
from quire.server.api.responses.protocol import InputItem
from quire.server.api.responses.references import read_references
from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError
from tests.server.in_process import Server
from tests.server.responses import URL, Say, create

CALL = '<tool_call>\n{"name": "forecast", "arguments": {"place": "Rome"}}\n</tool_call>'
THOUGHTFUL = "<think>\nhm\n</think>\nWell. " + CALL
FORMATS = {"tool_format": TOOL_FORMATS["hermes"], "reasoning_format": REASONING_FORMATS["think"]}
QUESTION = {"role": "user", "content": "Hi"}
FORECAST = {"type": "function", "name": "forecast", "parameters": {"type": "object"}}


def named(response: Any) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in response["output"]]


def test_items_that_are_named_are_read_as_if_they_were_repeated(say: Say) -> None:
    server = say(THOUGHTFUL, **FORMATS)
    more = {"tools": [FORECAST], "max_output_tokens": 200}
    first = create(server, input=[QUESTION], **more)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sun"}
    repeated = create(server, input=[QUESTION, *first["output"], result], **more)
    second = create(server, input=[QUESTION, *named(first), result], **more)
    assert second["usage"]["input_tokens"] == repeated["usage"]["input_tokens"]
    listed = [server.get(f"{URL}/{each['id']}/input_items?order=asc").json["data"] for each in (second, repeated)]
    assert listed[0][1:4] == listed[1][1:4]
    third = create(server, input=[*named(first), result, *named(second)], **more)
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def refused(server: Server, items: list[dict[str, Any]]) -> tuple[int, str, str | None]:
    answer = server.post(URL, {"input": items})
    return answer.status, answer.error["param"], answer.error["code"]


def test_an_item_that_is_not_stored_is_not_found(say: Say) -> None:
    server = say()
    reference, *_ = named(create(server))
    missing = (404, "input[1].id", "item_not_found")
    for other in ("msg_" + "0" * 36, "msg_1", "", "é", reference["id"] + "0", create(server, store=False)["id"]):
        assert refused(server, [QUESTION, reference | {"id": other}]) == missing
    assert refused(server, [QUESTION, {"type": "item_reference"}]) == missing
    assert refused(server, [reference, reference]) == missing, "it would be twice in the conversation"
    (unkept,) = named(create(server, store=False))
    assert refused(server, [QUESTION, unkept]) == missing
    assert create(server, input=[QUESTION, reference])["status"] == "completed"


def test_an_item_is_found_by_its_owner_alone(say: Say) -> None:
    server = say()
    (reference,) = named(create(server))
    item = [InputItem(type="item_reference", id=reference["id"])]
    store = stored_responses(server.state).store
    (found,) = asyncio.run(read_references(item, store, "", 10**6))
    assert found.content[0].text == "Hello!"  # type: ignore[index,union-attr]
    with pytest.raises(ApiError, match="no output item"):
        asyncio.run(read_references(item, store, "another", 10**6))


def test_what_is_named_is_limited(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    server = say(args=ServerArgs(max_body_bytes=2000))
    items = [each for _ in range(3) for each in named(create(server))]
    assert refused(server, items) == (400, "input", None), "the responses are larger together than a body may be"
    monkeypatch.setattr(references, "MAX_CHAIN", 1)
    assert refused(server, items[:2]) == (400, "input", None)


def test_a_prompt_is_counted_as_it_would_be_used(say: Say) -> None:
    server = say()
    first = create(server)
    for fields in (
        {"input": "And?"},
        {"input": "And?", "instructions": "Be terse.", "tools": [FORECAST]},
        {"input": "And?", "previous_response_id": first["id"]},
        {"input": [*named(first), QUESTION]},
    ):
        counted = server.post(f"{URL}/input_tokens", fields)
        expected = {
            "object": "response.input_tokens",
            "input_tokens": create(server, **fields)["usage"]["input_tokens"],
        }
        assert (counted.status, counted.json) == (200, expected)
    wrong = server.post(f"{URL}/input_tokens", {"input": []})
    assert (wrong.status, json.loads(wrong.body)["error"]["param"]) == (400, "input")


def test_the_path_of_the_count_is_not_that_of_a_response(say: Say) -> None:
    server = say()
    for method in ("GET", "DELETE", "OPTIONS"):
        answer = server.call(method, f"{URL}/input_tokens")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert server.get(f"{URL}/input_token").error["code"] == "response_not_found"
