"""Streams and those who leave: keep-alives, errors before and after the first chunk, aborts."""

import asyncio
import itertools
import json
import logging
from contextlib import aclosing

import pytest

from quire.common.errors import EngineBrokenError
from quire.server.app import Application
from quire.server.config import ServerArgs
from quire.server.http import sse
from tests.scripted_engine import scripted_llm
from tests.server.in_process import saying, serve

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
LONG = {
    COMPLETIONS: {"prompt": ["Hello", "you"], "n": 2, "max_tokens": 200, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "ignore_eos": True},
    MESSAGES: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "ignore_eos": True},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("vanish_after", [0, 3])
def test_a_client_that_vanishes_has_its_request_aborted(reciting, path, stream, vanish_after):
    body = json.dumps(LONG[path] | {"stream": stream}).encode()

    async def vanish():
        """Until the answer ends, which nobody reads; then the engine must be empty within two steps."""
        await reciting.request("POST", path, body, vanish_after=vanish_after if stream else 0)
        num_steps = reciting.executor.num_steps
        while reciting.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        return reciting.executor.num_steps - num_steps

    assert asyncio.run(vanish()) <= 2
    assert reciting.executor.num_steps < 150
    assert reciting.engine.stats().num_used_blocks == 0
    assert reciting.state.num_in_flight == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
def test_a_client_that_vanishes_before_the_first_token_is_not_waited_for(reciting, path, monkeypatch):
    monkeypatch.setattr(sse, "PEEK_S", 600)
    has_ended = False

    async def waiting(prompt, params, request_id, *, lora_request, holds):
        nonlocal has_ended
        try:
            await asyncio.Event().wait()
            yield
        finally:
            has_ended = True

    reciting.llm.generate = waiting
    body = json.dumps(LONG[path] | {"stream": True}).encode()
    asyncio.run(asyncio.wait_for(reciting.request("POST", path, body, vanish_after=0), 60))
    assert has_ended


def test_the_head_of_a_stream_has_an_end(reciting):
    async def frames(engine):
        yield b"never sent"
        await asyncio.Event().wait()

    reciting.llm.watch_cache = frames
    answer = asyncio.run(asyncio.wait_for(reciting.request("HEAD", "/debug/cache/events"), 60))
    assert answer.is_complete
    assert (answer.status, answer.body) == (200, b"")
    assert reciting.state.num_cache_watchers == 0


@pytest.mark.essential
def test_others_go_on_when_one_vanishes(reciting):
    body = json.dumps(LONG[CHAT] | {"stream": True}).encode()

    async def both():
        return await asyncio.gather(
            reciting.request("POST", CHAT, body, vanish_after=5),
            reciting.request("POST", CHAT, body, vanish_after=10**6),
        )

    gone, stayed = asyncio.run(both())
    assert not gone.is_complete
    assert stayed.is_complete
    assert stayed.events == _without_ids(reciting.post(CHAT, json.loads(body)).events, stayed.events)


def _without_ids(events, others):
    """What differs between two answers to one request is taken from the other."""
    for event, other in zip(events, others, strict=True):
        for key in ("id", "created", "timings"):
            if key in other:
                event[key] = other[key]
    return events


def test_load_counts_requests_in_flight(reciting):
    async def look():
        call = asyncio.create_task(reciting.request("POST", COMPLETIONS, json.dumps(LONG[COMPLETIONS]).encode()))
        while not reciting.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        loads = [(await reciting.request("GET", "/load", vanish_after=10)).json]
        await call
        return [*loads, (await reciting.request("GET", "/load")).json]

    assert asyncio.run(look()) == [{"server_load": 1}, {"server_load": 0}]


@pytest.mark.parametrize("stream", [True, False])
def test_a_grammar_that_does_not_compile_is_a_400(tiny, stream):
    answer = tiny.post(COMPLETIONS, {"prompt": "a", "guided_regex": "(", "stream": stream})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_fails_at_once_is_a_500_and_a_broken_engine_a_503(stream, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    server = saying()
    server.executor.before_step = _raising(KeyError("secret"), from_step=1)
    for status in (500, 503):
        if status == 503:
            monkeypatch.setattr(server.engine, "step", _raising(EngineBrokenError("it is: /secret"), from_step=1))
        answer = server.post(CHAT, LONG[CHAT] | {"stream": stream})
        assert answer.status == status
        assert "secret" not in answer.error["message"]
        assert answer.headers["x-request-id"] in caplog.text


def _raising(error, from_step):
    steps = itertools.count(1)

    def before_step(*_):
        if next(steps) >= from_step:
            raise error

    return before_step


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_mid_stream_is_the_last_event(path):
    server = saying()
    server.executor.before_step = _raising(KeyError("secret"), from_step=8)
    answer = server.post(path, LONG[path] | {"stream": True})
    assert answer.status == 200
    *chunks, last = answer.events
    assert len(chunks) > 5
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal_error")
    assert "secret" not in answer.body.decode()


def test_an_error_after_the_headers_but_before_the_first_chunk_is_an_event(monkeypatch):
    monkeypatch.setattr(sse, "PEEK_S", 0.0)
    server = saying()
    _hold_until(server, lambda message: message["type"] == "http.response.start")
    answer = server.post(COMPLETIONS, {"prompt": "", "stream": True})
    assert answer.status == 200
    (only,) = answer.events
    assert only["error"]["param"] == "prompt"


def test_comments_keep_a_silent_stream_alive(monkeypatch):
    monkeypatch.setattr(sse, "PEEK_S", 0.0)
    server = saying(args=ServerArgs(keep_alive_s=0.01))
    comments = []

    def are_two(message):
        comments.append(message.get("body") == sse.KEEP_ALIVE)
        return sum(comments) == 2

    _hold_until(server, are_two)
    answer = server.post(CHAT, LONG[CHAT] | {"stream": True, "max_tokens": 3})
    assert answer.frames[:2] == [": keep-alive"] * 2
    assert answer.events[-1]["choices"][0]["finish_reason"] == "length"


def _hold_until(server, opens):
    """The engine does nothing until a message of the answer `opens` the gate."""
    llm, app, gate = server.llm, server.app, asyncio.Event()
    generate = llm.generate

    async def held(*args, **kwargs):
        await gate.wait()
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                yield output

    async def watching(scope, receive, send):
        async def watch(message):
            await send(message)
            if opens(message):
                gate.set()

        await app(scope, receive, watch)

    llm.generate, server.app = held, watching


def test_what_the_engine_aborts_is_reported():
    llm, executor = scripted_llm()
    server = serve(llm.engine, executor)

    async def abort():
        call = asyncio.create_task(server.request("POST", CHAT, json.dumps(LONG[CHAT] | {"stream": True}).encode()))
        while executor.num_steps < 5:
            await asyncio.sleep(0)
        door = server.llm
        for request_id, queue in door._queues.items():
            queue.put_nowait(llm.engine.abort_request(request_id))
        return await call

    assert asyncio.run(abort()).events[-1]["error"]["code"] == "aborted"


def test_an_answer_that_has_begun_is_cut_off_when_its_endpoint_fails(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    sent = []

    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("planted")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [(b"x-request-id", b"cut")]}
    asyncio.run(Application(None, failing)(scope, None, send))
    assert [message["type"] for message in sent] == ["http.response.start"], "no end: the client sees that it is broken"
    assert "planted" in caplog.text


def test_a_websocket_is_closed_at_once(reciting):
    sent = []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(reciting.app({"type": "websocket", "path": "/v1/completions", "headers": []}, None, send))
    assert sent == ["websocket.close"]
