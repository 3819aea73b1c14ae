"""Streams that the server aborts, as at a deadline or at its end: each ends as its protocol says."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.server.app import make_app
from quire.server.operations.lifecycle import DrainGate
from tests.server.in_process import Answer, Server, hold
from tests.server.responses import URL, Say, events_of

LONG = "word " * 60
MESSAGES = [{"role": "user", "content": "Hi"}]


def aborted(server: Server, path: str, *, is_read: bool = True, **body: Any) -> Answer:
    """The answer to a request that is aborted after its first text was sent, which its client may not read."""
    gate, begun = DrainGate(request_timeout_s=None, drain_timeout_s=0), asyncio.Event()
    app = make_app(server.state, wrap=lambda app, _: gate.around(app))

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_note(message: Message) -> None:
            is_first = b"word" in message.get("body", b"") and not begun.is_set()
            if is_first:
                begun.set()
            if is_first and not is_read:
                await asyncio.Event().wait()
            await send(message)

        await app(scope, receive, send_and_note)

    async def play() -> Answer:
        hold(server)
        call = asyncio.create_task(server.request("POST", path, json.dumps(body | {"stream": True}).encode()))
        await asyncio.wait_for(begun.wait(), 60)
        await gate.drain()
        return await asyncio.wait_for(call, 60)

    server.app = watched  # type: ignore[assignment]
    answer = asyncio.run(play())
    assert (answer.status, answer.is_complete) == (200, True)
    assert not server.engine.has_unfinished_requests()
    return answer


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "Hi", "max_tokens": 100}), ("/v1/chat/completions", {"messages": MESSAGES})],
)
def test_openais_ends_with_an_error_and_done(say: Say, path: str, body: dict[str, Any]) -> None:
    events = aborted(say(LONG), path, **body).events
    assert len(events) > 2
    assert events[-1]["error"]["code"] == "shutting_down"


def test_anthropics_ends_with_an_error_that_has_the_requests_id(say: Say) -> None:
    answer = aborted(say(LONG), "/v1/messages", messages=MESSAGES, max_tokens=100)
    last = events_of(answer)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert last["request_id"] == answer.headers["request-id"]


def test_ollamas_ends_with_a_line_that_has_an_error(say: Say) -> None:
    answer = aborted(say(LONG), "/api/chat", model="quire-tiny", messages=MESSAGES)
    assert "shutting down" in json.loads(answer.body.splitlines()[-1])["error"]


def test_a_response_ends_as_failed_and_is_stored_so(say: Say) -> None:
    server = say(LONG)
    events = events_of(aborted(server, URL, input="Hi"))
    last = events[-1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "shutting_down")
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert server.get(f"{URL}/{last['response']['id']}").json == last["response"]


def test_a_response_that_its_client_does_not_read_is_stored_as_failed(say: Say) -> None:
    server = say(LONG)
    events = events_of(aborted(server, URL, is_read=False, input="Hi"))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "shutting_down")
    stored = server.get(f"{URL}/{events[0]['response']['id']}").json
    assert (stored["status"], stored["error"]["code"]) == ("failed", "shutting_down")
