"""The log: one line per request, that no client can forge or break, and nothing of what was said."""

import asyncio
import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.common.log import JsonFormatter, TextFormatter
from quire.common.outputs import RequestMetrics
from quire.common.params import SamplingParams
from quire.server.http.state import CLIENT_CLOSED_REQUEST, RequestContext, context_of
from quire.server.operations.request_log import (
    EngineListener,
    Observer,
    log_request,
)

TEXT = TextFormatter("%(levelname)s %(message)s")


@pytest.fixture
def lines(monkeypatch):
    """What the log was told, formatted as text."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(record)

    log = logging.getLogger("quire")
    handler = Keep()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


def observe(
    app, *, keep_bodies: bool = False, body: bytes = b"{}", method: str = "POST", path: str = "/v1/completions"
) -> RequestContext:
    records: list[RequestContext] = []

    async def main():
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            pass

        scope = {"type": "http", "method": method, "path": path, "headers": [(b"x-request-id", b"req-1")]}
        await Observer(app, [records.append], keep_bodies=keep_bodies)(scope, receive, send)

    asyncio.run(main())
    return records[0]


def answering(status: int = 200, tenant: str = "alice", listener: EngineListener | None = None):
    """An application that asks the engine twice, as for two prompts."""

    async def app(scope, receive, send):
        context = context_of(scope)
        context.tenant, context.route = tenant, "/v1/completions"
        await receive()
        for engine_id in ("e-1", "e-2") if listener else ():
            listener.on_request_start(engine_id, 10, SamplingParams(tenant=f"{tenant}/carol"))
            listener.on_tokens(engine_id, 3, context.start_s + 0.5)
            moments = RequestMetrics(1.0, 1.25, 1.5, 2.0)
            listener.on_request_end(engine_id, moments, 4, "length", 3)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_record_contains_what_engine_and_answer_report():
    record = observe(answering(listener=EngineListener()))
    assert (record.method, record.route, record.status) == ("POST", "/v1/completions", 200)
    assert (record.request_id, record.engine_tenant, record.finish_reason) == ("req-1", "alice/carol", "length")
    assert (record.num_prompt_tokens, record.num_generated_tokens, record.num_cached_tokens) == (20, 6, 8)
    assert (record.first_token_s, record.queue_s) == (pytest.approx(0.5), 0.25)
    assert record.num_tokens == 26
    assert record.body is None


def test_a_client_that_disconnects_and_an_unknown_path():
    async def gone(scope, receive, send):
        pass

    record = observe(gone, method="BREW")
    assert (record.status, record.route, record.method) == (CLIENT_CLOSED_REQUEST, "other", "other")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/compltions", "/v1/compltions"),
        ("/\x1b[31mred\n2026 INFO", '"/\\u001b[31mred\\n2026 INFO"'),
        ("/" + "a" * 5_000, "/" + "a" * 99),
    ],
)
def test_an_unknown_path_is_named_in_the_log_cut_and_escaped(lines, path, shown):
    async def unknown(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})

    log_request(observe(unknown, path=path))
    assert TEXT.format(lines[0]).startswith(f"INFO POST {shown} 404 request_id=req-1")
    fields = json.loads(JsonFormatter().format(lines[0]))
    assert (fields["route"], fields["path"]) == ("other", path[:100])


def test_a_failure_is_recorded_and_handed_on():
    async def broken(scope, receive, send):
        raise RuntimeError("broken")

    records: list[RequestContext] = []
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with pytest.raises(RuntimeError):
        asyncio.run(Observer(broken, [records.append])(scope, None, None))
    assert len(records) == 1
    listener = EngineListener()
    listener.on_request_start("e-1", 10, SamplingParams())
    assert records[0].num_prompt_tokens == 0, "later requests of the engine are not its own"


def test_bodies_are_kept_only_on_demand_and_not_without_end():
    secret = b'{"prompt": "my secret"}'
    assert observe(answering(), body=secret).body is None
    assert observe(answering(), body=secret, keep_bodies=True).body == secret
    assert len(observe(answering(), body=b"x" * 10**6, keep_bodies=True).body) == 64 * 1024


def test_the_line_in_both_formats(lines):
    log_request(observe(answering(listener=EngineListener())))
    text = TEXT.format(lines[0])
    assert text.startswith("INFO POST /v1/completions 200 request_id=req-1 tenant=alice/carol prompt_tokens=20")
    assert "reason=length" in text
    fields = json.loads(JsonFormatter().format(lines[0]))
    assert fields | {"time": "", "seconds": 0} == {
        "time": "", "level": "info", "message": "POST /v1/completions 200", "method": "POST",
        "route": "/v1/completions", "status": 200, "request_id": "req-1", "tenant": "alice/carol",
        "prompt_tokens": 20, "cached_tokens": 8,
        "generated_tokens": 6, "queue_s": 0.25, "first_token_s": 0.5, "seconds": 0, "reason": "length",
    }  # fmt: skip


def test_probes_that_go_well_are_left_out(lines):
    log_request(RequestContext(request_id="r", method="GET", route="/metrics", status=200))
    assert lines == []
    log_request(RequestContext(request_id="r", method="GET", route="/ready", status=503))
    assert len(lines) == 1


@given(st.text())
def test_no_tenant_can_forge_a_line(tenant):
    record = logging.LogRecord("quire", logging.INFO, "", 0, "GET / 200", (), None)
    record.fields = {"tenant": tenant}
    text = TEXT.format(record)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(JsonFormatter().format(record))["tenant"] == tenant
    assert JsonFormatter().format(record).isascii()


@given(st.text())
def test_no_message_can_look_like_two(message):
    record = logging.LogRecord("quire", logging.INFO, "", 0, "%s", (message,), None)
    first, *others = TEXT.format(record).splitlines()
    assert first.startswith("INFO ")
    assert all(line.startswith("    ") for line in others)
    assert "\x1b" not in first + "".join(others)
    assert json.loads(JsonFormatter().format(record))["message"] == message


def test_an_exception_is_shown():
    try:
        raise ValueError("inner\nINFO forged")
    except ValueError as error:
        record = logging.LogRecord(
            "quire", logging.ERROR, "", 0, "failed", (), (type(error), error, error.__traceback__)
        )
    assert "\n    ValueError: inner\n    INFO forged" in TEXT.format(record)
    assert "ValueError" in json.loads(JsonFormatter().format(record))["exception"]


def test_a_server_logs_the_warnings_of_libraries_in_its_own_format():
    code = (
        "import logging, warnings; from quire.common.log import set_up_logging; set_up_logging('json');"
        "logging.getLogger('asyncio').error('a'); logging.getLogger('opentelemetry.sdk').warning('b');"
        "warnings.warn('c')"
    )
    ran = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    messages = [json.loads(line)["message"] for line in ran.stderr.splitlines()]
    assert messages[:2] == ["a", "b"]
    assert "UserWarning: c" in messages[2]
