"""Spans: one per request, under the client's own trace, without text."""

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from quire.common.errors import ConfigError
from quire.common.params import PoolingParams, SamplingParams
from quire.server.http.state import RequestContext
from quire.server.operations.tracing import Tracer

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def context_with(**fields) -> RequestContext:
    known = {
        "route": "/v1/chat/completions", "status": 200, "start_ns": 10**18, "seconds": 1.5, "num_prompt_tokens": 12,
        "num_generated_tokens": 7, "num_cached_tokens": 4, "first_token_s": 0.25, "queue_s": 0.125,
        "finish_reason": "stop", "params": SamplingParams(temperature=0.5, max_tokens=9), "request_id": "req-1",
        "tenant": "alice",
    }  # fmt: skip
    return RequestContext(method="POST", headers=fields.pop("headers", []), **known | fields)


@pytest.fixture
def spans():
    """Makes spans of contexts."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

    def make(*contexts: RequestContext):
        exporter = memory.InMemorySpanExporter()
        tracer = Tracer("http://localhost:4318", "tiny", exporter)
        for context in contexts:
            tracer(context)
        tracer.shutdown()
        return exporter.get_finished_spans()

    return make


def test_a_span_has_the_times_and_the_tokens(spans):
    (span,) = spans(context_with())
    assert span.name == "chat tiny"
    assert (span.start_time, span.end_time) == (10**18, 10**18 + 1_500_000_000)
    assert span.parent is None
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "quire", "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 9, "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 7, "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",), "gen_ai.latency.time_to_first_token": 0.25,
        "http.route": "/v1/chat/completions", "http.response.status_code": 200, "quire.tenant": "alice",
    }  # fmt: skip
    assert {name: span.attributes[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": "other"}, "chat other"),
        ({"model": "other", "route": "/v1/completions"}, "text_completion other"),
        ({"model": "other", "params": PoolingParams(task="embed")}, "embeddings other"),
        ({"model": "other", "params": PoolingParams(task="score")}, "score other"),
    ],
)
def test_a_span_names_what_the_request_does_and_its_model(spans, fields, name):
    (span,) = spans(context_with(**fields))
    assert span.name == name
    assert name == f"{span.attributes['gen_ai.operation.name']} {span.attributes['gen_ai.request.model']}"


@pytest.mark.parametrize(("given", "name"), [(None, "quire"), ("", "quire"), ("chat-eu", "chat-eu")])
def test_the_service_has_the_name_that_the_environment_gives(spans, monkeypatch, given, name):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    if given is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    (span,) = spans(context_with())
    assert span.resource.attributes["service.name"] == name


def test_the_clients_trace_goes_on(spans):
    header = f"00-{TRACE_ID}-{SPAN_ID}-01".encode()
    child, broken = spans(
        context_with(headers=[(b"traceparent", header)]), context_with(headers=[(b"traceparent", b"\xff")])
    )
    assert f"{child.context.trace_id:032x}" == TRACE_ID
    assert f"{child.parent.span_id:016x}" == SPAN_ID
    assert broken.parent is None


def test_what_generates_nothing_has_a_plain_span_and_probes_none(spans):
    (span,) = spans(
        context_with(route="/v1/models", params=None), context_with(route="/health"), context_with(route="/metrics")
    )
    assert span.name == "/v1/models"
    assert not [name for name in span.attributes if name.startswith("gen_ai")]


def test_an_error_is_marked_and_a_long_value_cut(spans):
    (span,) = spans(context_with(status=504, tenant="x" * 5000))
    assert span.attributes["error.type"] == "504"
    assert len(span.attributes["quire.tenant"]) == 256


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "", "http://"])
def test_an_endpoint_other_than_a_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        Tracer(endpoint, "tiny")


def test_without_opentelemetry_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[tracing\]'"):
        Tracer("http://localhost:4318", "tiny")


@pytest.fixture
def no_thread_stays(monkeypatch):
    """Sending is given up after five seconds, and waited for: other tests do not expect a thread that retries."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(15)
        assert not thread.is_alive(), thread


def stopping(endpoint: str) -> float:
    """The seconds that the end of a tracer takes that has a span to send."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    tracer = Tracer(endpoint, "tiny")
    tracer(context_with())
    begin_s = time.monotonic()
    tracer.shutdown()
    return time.monotonic() - begin_s


@pytest.mark.usefixtures("no_thread_stays")
def test_a_collector_that_does_not_answer_delays_the_end_little(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert stopping(endpoint) < 4
    assert stopping(endpoint) < 4, "nothing listens there now"
    assert caplog.text.count("the last spans were not sent: the collector did not answer within 2 s") == 2


@pytest.mark.usefixtures("no_thread_stays")
def test_the_last_spans_are_sent_to_a_collector_that_answers_late():
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            time.sleep(0.5)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            stopping(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"req-1" in body
