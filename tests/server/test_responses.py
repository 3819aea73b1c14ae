"""/v1/responses over HTTP, with an engine that says what it is told to."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.server.api.responses import run
from quire.server.api.responses.endpoint import stored_responses
from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.server.config import ServerArgs
from quire.server.http.state import RequestContext, context_of
from tests.server.in_process import Server
from tests.server.responses import URL, Say, create, events_of

FORECAST = {
    "type": "function",
    "name": "forecast",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>\n{"name": "forecast", "arguments": {"place": "Rome"}}\n</tool_call>'


def without_what_differs(response: dict[str, Any]) -> str:
    """Ids, times and what the cache held are not the same twice."""
    plain = json.loads(json.dumps(response))
    for name in ("id", "created_at", "completed_at", "usage"):
        del plain[name]
    for item in plain["output"]:
        item["id"] = item["call_id"] = ""
    return json.dumps(plain)


def test_an_answer(say: Say) -> None:
    response = create(say(), metadata={"a": "b"}, temperature=0.5, user="u")
    assert response["id"].startswith("resp_")
    (message,) = response["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}]
    expected = {
        "object": "response", "status": "completed", "model": "quire-tiny", "error": None, "metadata": {"a": "b"},
        "temperature": 0.5, "user": "u", "store": True, "tool_choice": "auto", "incomplete_details": None,
    }  # fmt: skip
    assert {name: response[name] for name in expected} == expected
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] > 0


@pytest.mark.parametrize("field", ["text", "structured_outputs"])
def test_an_answer_in_a_structural_tag(tiny: Server, field: str) -> None:
    parts = [{"type": "const_string", "value": "<n>"}, {"type": "regex", "pattern": "[0-9]{2}"}]
    form = {"type": "sequence", "elements": parts}
    tag = {"type": "structural_tag", "format": form}
    given = {"format": tag} if field == "text" else {"structural_tag": tag}
    response = create(tiny, **{field: given})
    assert re.fullmatch("<n>[0-9]{2}", response["output"][0]["content"][0]["text"])
    assert response["text"]["format"] == (tag if field == "text" else {"type": "text"})


def test_an_answer_at_the_limit_is_incomplete(say: Say) -> None:
    response = create(say("Hello! Hello! Hello!"), max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == 2


THOUGHTFUL = "<think>\nhm\n</think>\nWell. " + CALL


@pytest.mark.parametrize(("reply", "num_items"), [("Hello!", 1), (CALL, 1), (THOUGHTFUL, 3), ("", 1)])
def test_a_stream_folded_is_the_whole_answer(say: Say, reply: str, num_items: int) -> None:
    formats = {"tool_format": TOOL_FORMATS["hermes"], "reasoning_format": REASONING_FORMATS["think"]}
    server = say(reply, **formats)
    fields = {"input": "Hi", "max_output_tokens": 200, "tools": [FORECAST]}
    whole = server.post(URL, fields).json
    events = events_of(server.post(URL, {**fields, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert without_what_differs(events[-1]["response"]) == without_what_differs(whole)
    assert len(whole["output"]) == num_items
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_thoughts_are_counted(say: Say) -> None:
    response = create(say("<think>\nhm\n</think>\nYes.", reasoning_format=REASONING_FORMATS["think"]))
    reasoning, message = response["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm")
    assert message["content"][0]["text"] == "Yes."
    details = response["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < response["usage"]["output_tokens"]


def test_a_call_and_its_result_go_on(say: Say) -> None:
    server = say(CALL, tool_format=TOOL_FORMATS["hermes"])
    first = create(server, tools=[FORECAST])
    (call,) = first["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call", "forecast", {"place": "Rome"},
    )  # fmt: skip
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    assert create(server, input=[result], previous_response_id=first["id"])["status"] == "completed"
    refused = server.post(URL, {"input": [result]})
    assert (refused.status, refused.error["param"]) == (400, "input")


def test_logprobs_when_they_are_asked_for(say: Say) -> None:
    response = create(say(), include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).startswith("Hello!")
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}


def test_the_bytes_of_all_tokens_are_those_of_the_text(say: Say) -> None:
    response = create(say("🎉é日"), include=["message.output_text.logprobs"])
    *told, _ = response["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == "🎉é日"


def input_tokens(server: Server, **fields: Any) -> int:
    return int(create(server, **fields)["usage"]["input_tokens"])


def test_a_chain_has_all_items_but_no_instructions_of_before(say: Say) -> None:
    server = say()
    first = create(server, instructions="Be terse.")
    second = create(server, input="And now?", previous_response_id=first["id"])
    items = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    assert second["usage"]["input_tokens"] == input_tokens(server, input=items)
    assert second["instructions"] is None
    third = create(server, input="More", previous_response_id=second["id"], instructions="Be terse.")
    items += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "More"}]
    assert third["usage"]["input_tokens"] == input_tokens(server, input=items, instructions="Be terse.")


@pytest.mark.parametrize("previous", ["resp_" + "0" * 32, "", "nonsense", "'; DROP TABLE responses", "é"])
def test_a_chain_from_nowhere_is_not_found(say: Say, previous: str) -> None:
    answer = say().post(URL, {"input": "Hi", "previous_response_id": previous})
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")


def test_what_is_kept_is_got_listed_and_forgotten(say: Say) -> None:
    server = say()
    response = create(server, input=[{"role": "user", "content": word} for word in "abc"])
    url = f"{URL}/{response['id']}"
    assert server.get(url).json == response
    listed = server.get(f"{url}/input_items").json
    assert [item["content"][0]["text"] for item in listed["data"]] == ["c", "b", "a"]
    page = server.get(f"{url}/input_items?limit=1&order=asc&after={listed['last_id']}").json
    assert (page["data"][0]["content"][0]["text"], page["has_more"]) == ("b", True)
    assert server.call("DELETE", url).json == {"id": response["id"], "object": "response.deleted", "deleted": True}
    for method, path in (("GET", url), ("DELETE", url), ("POST", f"{url}/cancel"), ("GET", f"{url}/input_items")):
        assert server.call(method, path).status == 404
    assert server.post(URL, {"input": "Hi", "previous_response_id": response["id"]}).status == 404


def test_answers_are_as_described(say: Say) -> None:
    server = say()
    document = server.get("/openapi.json").json
    path = f"{URL}/{{response_id}}"
    one = f"{URL}/{create(server, metadata={'a': 'b'}, tools=[FORECAST])['id']}"
    background = f"{URL}/{create(server, background=True)['id']}"
    for method, described, called in (
        ("POST", URL, URL), ("GET", path, one), ("GET", f"{path}/input_items", f"{one}/input_items"),
        ("POST", f"{path}/cancel", f"{background}/cancel"), ("DELETE", path, one),
    ):  # fmt: skip
        answer = server.call(method, called, b'{"input": "Hi"}' if called == URL else b"")
        content = document["paths"][described][method.lower()]["responses"][str(answer.status)]["content"]
        schema = content["application/json"]["schema"] | {"components": document["components"]}
        jsonschema.validate(answer.json, schema)
        assert answer.status == 200, called


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "after=nobody", "limit=-1"])
def test_an_invalid_page_is_refused(say: Say, query: str) -> None:
    server = say()
    answer = server.get(f"{URL}/{create(server)['id']}/input_items?{query}")
    assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])


def test_what_is_not_to_be_kept_is_not(say: Say) -> None:
    server = say()
    response = create(server, store=False)
    assert server.get(f"{URL}/{response['id']}").status == 404


def test_a_response_is_there_for_its_key_alone(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    server = say()

    def context(request: Any) -> RequestContext:
        found = context_of(request)
        found.tenant = request.headers.get("x-api-key", "")
        return found

    monkeypatch.setattr("quire.server.api.responses.endpoint.context_of", context)
    mine = server.post(URL, {"input": "Hi"}, headers={"x-api-key": "mine"}).json
    url = f"{URL}/{mine['id']}"
    for key, status in (("other", 404), ("", 404), ("mine", 200)):
        headers = {"x-api-key": key}
        follow = {"input": "Hi", "previous_response_id": mine["id"]}
        assert server.get(url, headers=headers).status == status
        assert server.get(f"{url}/input_items", headers=headers).status == status
        assert server.post(URL, follow, headers=headers).status == status
        if status == 404:
            assert server.call("DELETE", url, headers=headers).status == status
            assert server.post(f"{url}/cancel", {}, headers=headers).status == status


def test_kept_responses_survive_a_restart(say: Say, tmp_path: Path) -> None:
    args = ServerArgs(response_store=str(tmp_path / "responses.db"))
    server = say(args=args)
    response = create(server)
    asyncio.run(stored_responses(server.state).shutdown())
    server.state.responses = None
    again = say(args=args)
    assert again.get(f"{URL}/{response['id']}").json == response
    assert create(again, previous_response_id=response["id"])["status"] == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": -1}, "temperature"),
        ({"input": "word " * 5000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}}, None),
        ({"text": {"format": {"type": "structural_tag", "format": {"type": "nonsense"}}}}, "text"),
        ({"text": {"format": {"type": "structural_tag"}}}, "text"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "nonsense"}}}}, "structured_outputs"),
        ({"tools": [FORECAST], "tool_choice": {"type": "function", "name": "other"}}, None),
        ({"tool_choice": {"type": "function", "name": "other"}}, None),
        ({"tools": [], "tool_choice": "required"}, None),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_request_is_answered_400_and_not_stored(
    say: Say, fields: dict[str, Any], param: str | None, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHECK_S", 60)  # on a busy machine, a grammar may take longer to be refused than usual
    server = say()
    answer = server.post(URL, {"input": "Hi", "stream": stream, **fields})
    assert answer.status == 400, answer.body
    if param is not None:
        assert answer.error["param"] == param
    if server.state.responses is not None:
        assert asyncio.run(stored_responses(server.state).store._run(number_kept)) == 0


def number_kept(connection: Any) -> int:
    return int(connection.execute("SELECT count(*) FROM responses").fetchone()[0])


def test_unknown_fields_are_named(say: Say) -> None:
    parts = [{"type": "input_text", "text": "Hi"}]
    answer = say().post(URL, {"input": [{"type": "message", "role": "user", "content": parts}], "frobnicate": 1})
    assert answer.status == 200
    assert answer.headers["x-quire-warning"] == "unknown fields ignored: frobnicate", "types of parts are known"


def test_a_clients_request_id_is_not_the_id_of_the_response(say: Say) -> None:
    server = say()
    mine = create(server)
    other = server.post(URL, {"input": "Hi"}, headers={"x-request-id": mine["id"]}).json
    assert other["id"] != mine["id"]


def fail_writes(server: Server) -> None:
    """As on a full disk."""
    store = stored_responses(server.state).store
    store._thread.submit(store._connection.execute, "PRAGMA query_only = ON").result()


def test_a_store_that_fails_early_is_reported_by_the_status(say: Say) -> None:
    server = say()
    fail_writes(server)
    answer = server.post(URL, {"input": "Hi"})
    assert (answer.status, answer.error["code"]) == (500, "store_unavailable")
    assert create(server, store=False)["status"] == "completed"


def test_a_store_that_fails_at_the_end_fails_the_response(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    server = say()
    store = stored_responses(server.state).store
    add = store.add

    async def add_then_fail(*args: Any) -> None:
        await add(*args)
        fail_writes(server)

    monkeypatch.setattr(store, "add", add_then_fail)
    events = events_of(server.post(URL, {"input": "Hi", "stream": True}))
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "store_unavailable"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_the_oldest_responses_are_removed(say: Say) -> None:
    server = say(args=ServerArgs(response_store_max=2))
    ids = [create(server)["id"] for _ in range(3)]
    assert [server.get(f"{URL}/{name}").status for name in ids] == [404, 200, 200]


def test_a_server_that_stores_nothing_says_so(say: Say) -> None:
    server = say(args=ServerArgs(response_store_max=0))
    made = create(server)
    assert made["store"] is False
    assert server.get(f"{URL}/{made['id']}").status == 404
    for name in ("store", "background"):
        refused = server.post(URL, {"input": "Hi", name: True})
        assert (refused.status, refused.error["param"]) == (400, name)
        assert "this server stores no responses" in refused.error["message"]
