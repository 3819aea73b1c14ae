"""Deadlines and draining, on applications that never end by themselves."""

import asyncio
from types import SimpleNamespace

import pytest

from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError
from quire.server.http.sse import DONE, EventStream, openai_error
from quire.server.http.state import begin_request
from quire.server.operations.admission import Admission
from quire.server.operations.lifecycle import AdmissionControl, DrainGate, LoadingApp


def scope_of(method: str = "POST", path: str = "/v1/chat/completions") -> dict:
    scope = {"type": "http", "method": method, "path": path, "headers": [], "client": ("10.0.0.1", 1)}
    begin_request(scope)
    return scope


class Sent:
    def __init__(self) -> None:
        self.messages: list[dict] = []

    async def __call__(self, message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


class Endless:
    """An application that may begin a stream, and then waits for good."""

    def __init__(self, *, begins: bool = False) -> None:
        self.begins = begins
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, scope, receive, send) -> None:
        if self.begins:
            stays = asyncio.Event()
            await EventStream(self._events(), openai_error, b"", 60.0)(scope, stays.wait, send)
        else:
            await self._wait()

    async def _events(self):
        yield b"data: 1\n\n"
        await self._wait()
        yield DONE

    async def _wait(self) -> None:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def run(test) -> None:
    """A test that waits for what does not come fails instead."""
    asyncio.run(asyncio.wait_for(test, 60))


def gate_of(request_timeout_s: float | None = None, drain_timeout_s: float = 0.01) -> DrainGate:
    return DrainGate(request_timeout_s=request_timeout_s, drain_timeout_s=drain_timeout_s)


def test_a_request_that_takes_too_long_is_aborted():
    async def main():
        app = Endless()
        with pytest.raises(ApiError) as raised:
            await gate_of(request_timeout_s=0.01).around(app)(scope_of(), None, Sent())
        assert app.was_cancelled
        assert (raised.value.status, raised.value.code) == (504, "request_timeout")

    run(main())


def test_a_stream_that_takes_too_long_ends_with_an_error():
    async def main():
        sent, app = Sent(), Endless(begins=True)
        await gate_of(request_timeout_s=0.01).around(app)(scope_of(), None, sent)
        assert app.was_cancelled
        assert sent.status == 200
        assert b'\n\ndata: {"error":' in sent.body
        assert b'"code":"request_timeout"' in sent.body
        assert sent.body.endswith(DONE)
        assert sent.messages[-1]["more_body"] is False

    run(main())


def test_the_applications_own_timeouts_are_its_own():
    async def app(scope, receive, send):
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(gate_of(request_timeout_s=60).around(app)(scope_of(), None, Sent()))


def test_draining_waits_for_what_runs_and_lets_nothing_in():
    async def main():
        gate, app, sent = gate_of(drain_timeout_s=60), Endless(begins=True), Sent()
        running = asyncio.create_task(gate.around(app)(scope_of(), None, sent))
        await app.begun.wait()
        draining = asyncio.create_task(gate.drain())
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as raised:
            await gate.around(app)(scope_of(), None, Sent())
        assert raised.value.status == 503
        assert raised.value.headers["retry-after"] == "60"
        assert not draining.done()
        app.may_end.set()
        await asyncio.gather(draining, running)
        assert sent.body.endswith(b"[DONE]\n\n")
        assert not app.was_cancelled

    run(main())


def test_while_draining_one_may_still_look_and_then_no_more():
    async def main():
        gate, sent = gate_of(), Sent()

        async def look(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})

        await gate.drain()
        await gate.around(look)(scope_of("GET", "/v1/responses/resp_1"), None, sent)
        assert sent.status == 200
        gate.close()
        with pytest.raises(ApiError) as raised:
            await gate.around(look)(scope_of("GET", "/v1/responses/resp_1"), None, Sent())
        assert raised.value.status == 503

    run(main())


def test_what_does_not_end_in_time_is_aborted_and_reported():
    async def main():
        gate, stream, whole, view = gate_of(), Endless(begins=True), Endless(), Endless(begins=True)
        sent, seen = Sent(), Sent()
        running = [
            asyncio.create_task(gate.around(stream)(scope_of(), None, sent)),
            asyncio.create_task(gate.around(whole)(scope_of(), None, Sent())),
            asyncio.create_task(gate.around(view)(scope_of("GET", "/debug/cache/events"), None, seen)),
        ]
        for app in (stream, whole, view):
            await app.begun.wait()
        await gate.drain()
        assert not view.was_cancelled
        gate.close()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert b"shutting_down" in sent.body
        assert isinstance(results[1], ApiError)
        assert results[1].status == 503
        assert view.was_cancelled
        assert seen.messages[-1]["more_body"] is False

    run(main())


def test_a_second_signal_ends_the_waiting_and_requests_get_an_error():
    async def main():
        gate, stream, whole, sent = gate_of(drain_timeout_s=600), Endless(begins=True), Endless(), Sent()
        running = [
            asyncio.create_task(gate.around(stream)(scope_of(), None, sent)),
            asyncio.create_task(gate.around(whole)(scope_of(), None, Sent())),
        ]
        await stream.begun.wait()
        await whole.begun.wait()
        draining = asyncio.create_task(gate.drain())
        await asyncio.sleep(0)
        draining.cancel()
        await asyncio.wait({draining}, timeout=60)
        results = await asyncio.gather(*running, return_exceptions=True)
        assert b"shutting_down" in sent.body
        assert results[1].status == 503

    asyncio.run(main())


def test_one_that_only_looks_is_not_waited_for_and_has_no_deadline():
    async def main():
        gate, app = gate_of(request_timeout_s=0.001, drain_timeout_s=1000), Endless(begins=True)
        running = asyncio.create_task(gate.around(app)(scope_of("GET"), None, Sent()))
        await app.begun.wait()
        await asyncio.sleep(0.01)
        assert not running.done()
        await gate.drain()
        gate.close()
        await running

    run(main())


@pytest.mark.parametrize(
    ("path", "expected"), [("/ready", b'{"status":"loading"}'), ("/v1/models", b'"code":"loading"')]
)
def test_until_the_model_is_there_the_answer_is_503(path, expected):
    async def main():
        front, sent = LoadingApp(), Sent()
        await front(scope_of("GET", path), None, sent)
        assert sent.status == 503
        assert expected in sent.body
        front.app = Endless(begins=True)
        front.app.may_end.set()
        sent = Sent()
        await front(scope_of("GET", path), None, sent)
        assert sent.status == 200

    run(main())


def test_admission_gets_the_key_or_else_the_address_and_the_tokens():
    async def app(scope, receive, send):
        scope["served"] = True
        scope["quire"].num_prompt_tokens, scope["quire"].num_generated_tokens = 50, 20

    async def main():
        admission = Admission(
            ServerArgs(tokens_per_minute=60), max_num_seqs=4, num_waiting=lambda: 0, clock=lambda: 0.0
        )
        middleware = AdmissionControl(app, admission)
        scope = scope_of()
        await middleware(scope, None, None)
        assert scope["served"]
        with pytest.raises(ApiError) as raised:
            await middleware(scope_of(), None, None)
        assert (raised.value.status, raised.value.code) == (429, "tokens_per_minute")
        assert int(raised.value.headers["retry-after"]) == 11
        other = scope_of()
        other["quire"].tenant = "alice"
        await middleware(other, None, None)
        await middleware(scope_of() | {"client": ("2001:db8::1", 1)}, None, None)
        with pytest.raises(ApiError, match="60 tokens per minute"):
            await middleware(scope_of() | {"client": ("2001:db8::2", 1)}, None, None)
        local = scope_of() | {"client": None}
        await middleware(local, None, None)
        assert admission.num_running == 0

    run(main())


def test_what_goes_on_after_the_answer_is_charged_at_its_end():
    async def main():
        may_end = asyncio.Event()

        async def generate():
            await may_end.wait()
            scope["quire"].num_generated_tokens += 20

        async def app(scope, receive, send):
            scope["quire"].num_prompt_tokens = 50
            scope["quire"].background = asyncio.create_task(generate())

        args = ServerArgs(tokens_per_minute=60)
        admission = Admission(args, max_num_seqs=4, num_waiting=lambda: 0, clock=lambda: 0.0)
        scope = scope_of()
        await AdmissionControl(app, admission)(scope, None, None)
        assert admission.enter("10.0.0.1") is None, "50 of 60 are used"
        may_end.set()
        await scope["quire"].background
        await asyncio.sleep(0)
        assert admission.enter("10.0.0.1").reason == "tokens_per_minute"

    run(main())


def test_a_request_that_fails_leaves_too():
    async def app(scope, receive, send):
        raise RuntimeError("broken")

    admission = SimpleNamespace(enter=lambda tenant: None, leave=lambda tenant, tokens: left.append(tenant))
    left: list[str] = []
    with pytest.raises(RuntimeError):
        asyncio.run(AdmissionControl(app, admission)(scope_of(), None, None))
    assert left == ["10.0.0.1"]


def test_it_is_idle_when_nothing_has_run_for_a_while(monkeypatch):
    monkeypatch.setattr("quire.server.operations.lifecycle.IDLE_S", 0.02)
    idle: list[int] = []

    async def main():
        gate = DrainGate(request_timeout_s=None, drain_timeout_s=1, on_idle=lambda: idle.append(gate.num_working))
        first, second = Endless(), Endless()
        first_runs, second_runs = (
            asyncio.create_task(gate.around(app)(scope_of(), None, Sent())) for app in (first, second)
        )
        await asyncio.gather(first.begun.wait(), second.begun.wait())
        first.may_end.set()
        await first_runs
        await asyncio.sleep(0.05)
        assert idle == [], "the second still runs"
        second.may_end.set()
        await second_runs
        await asyncio.sleep(0.05)

    run(main())
    assert idle == [0], "once, until there is work again"
