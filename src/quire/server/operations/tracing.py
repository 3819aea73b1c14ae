"""OpenTelemetry: a span for each request, off unless there is a collector to send them to."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.common.errors import ConfigError
from quire.common.log import logger
from quire.common.params import PoolingParams
from quire.common.version import __version__
from quire.server.http.state import RequestContext
from quire.server.operations.lifecycle import PROBES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_LAST_SPANS_S = 2


class Tracer:
    """A sink that makes a span of each request, with OpenTelemetry's attributes for generative AI and without any text.

    A request's `traceparent` header makes its span a child of the client's.
    """

    def __init__(self, endpoint: str, model_name: str, exporter: SpanExporter | None = None) -> None:
        """`endpoint` is a collector's URL for OTLP over HTTP, as http://localhost:4318. Raises ConfigError if it is not
        a URL, or if OpenTelemetry is not installed. An `exporter` receives the spans instead, without delay."""
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(f"otlp_endpoint={endpoint!r}: must be a URL such as http://localhost:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanLimits, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError("otlp_endpoint requires OpenTelemetry: pip install 'quire[tracing]'") from error
        self._model_name = model_name
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()
        name = os.environ.get("OTEL_SERVICE_NAME") or "quire"
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource, span_limits=SpanLimits(max_attribute_length=256), shutdown_on_exit=False
        )
        target = endpoint if url.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(target)) if exporter is None else SimpleSpanProcessor(exporter)
        )
        self._tracer = self._provider.get_tracer("quire", __version__)

    def __call__(self, context: RequestContext) -> None:
        """The request has ended: make its span."""
        if context.route in PROBES:
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in context.headers}
        attributes = self._attributes(context)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
            if context.params is not None
            else context.route,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            attributes=attributes,
            start_time=context.start_ns,
        )
        span.end(context.start_ns + int(context.seconds * 1e9))

    def shutdown(self) -> None:
        """Send the remaining spans, within _LAST_SPANS_S: OpenTelemetry would wait longer for a collector that does
        not answer."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)  # which does not keep the process alive
        sending.start()
        sending.join(_LAST_SPANS_S)
        if sending.is_alive():
            logger.warning("the last spans were not sent: the collector did not answer within %d s", _LAST_SPANS_S)

    def _attributes(self, context: RequestContext) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.request.method": context.method,
            "http.route": context.route,
            "http.response.status_code": context.status,
            "quire.request_id": context.request_id,
            "quire.tenant": context.engine_tenant,
        }
        if context.status >= 500:
            attributes["error.type"] = str(context.status)
        if context.params is None:
            return attributes
        attributes |= {
            "gen_ai.operation.name": _operation(context),
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": context.model or self._model_name,
            "gen_ai.request.choice.count": getattr(context.params, "n", 1),
            "gen_ai.response.finish_reasons": [context.finish_reason] if context.finish_reason else [],
            "gen_ai.usage.input_tokens": context.num_prompt_tokens,
            "gen_ai.usage.output_tokens": context.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": context.num_cached_tokens,
            "gen_ai.latency.e2e": context.seconds,
        }
        times = {"time_to_first_token": context.first_token_s, "time_in_queue": context.queue_s}
        attributes |= {f"gen_ai.latency.{name}": seconds for name, seconds in times.items() if seconds is not None}
        params = {name: getattr(context.params, name, None) for name in _PARAMS}
        return attributes | {f"gen_ai.request.{name}": value for name, value in params.items() if value is not None}


def _operation(context: RequestContext) -> str:
    """What the request does, in the words of the conventions where they have one."""
    if isinstance(context.params, PoolingParams):
        task = context.params.task or "embed"
        return "embeddings" if task == "embed" else task
    return "text_completion" if context.route == "/v1/completions" else "chat"
