"""The server's metrics in Prometheus' format: those of every model, and those of the server itself."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.endpoint import Endpoint
from quire.server.http.state import RequestContext, state_of
from quire.server.operations.model_metrics import ModelMetrics, process_memory

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_UNESCAPED = {"escaping": "allow-utf-8"} if hasattr(openmetrics, "ALLOWUTF8") else {}
"""No name needs an escape. Where the library has escapes for OpenMetrics, they turn the colons of all names into
underscores by default."""


class Metrics:
    """All metrics since the server started, in a registry of their own.

    The server's own metrics have the name of the first model, except that HTTP requests are counted by the model that
    they named.
    """

    def __init__(self, refused: Callable[[], Mapping[str, int]] = dict) -> None:
        """`refused` returns the number of refused requests by reason; it is called at each scrape."""
        self._refused = refused
        self._models: dict[str, ModelMetrics] = {}
        self._names: dict[str, str] = {}
        self._http: dict[str, Counter[tuple[str, str, str]]] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def add(self, model: ModelMetrics, *names: str) -> None:
        """Add the metrics of a model with these names, the first of which is its label."""
        self._models[names[0]] = model
        self._names |= dict.fromkeys(names, names[0])

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics and their content type: OpenMetrics if the `Accept` header asks for it, else Prometheus' text."""
        if _asks_for_openmetrics(accept or ""):
            body: bytes = openmetrics.generate_latest(self.registry, **_UNESCAPED)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), _TEXT

    def on_http_response(self, context: RequestContext) -> None:
        """The response to an HTTP request is complete."""
        name = self._names.get(context.base_model or context.model, next(iter(self._models)))
        self._http.setdefault(name, Counter())[context.route, context.method, str(context.status)] += 1

    def collect(self) -> Iterator[Metric]:
        """The current metrics, with the rows of all models in one family; called by prometheus-client."""
        families: dict[str, Metric] = {}
        for metric in chain(*(model.collect() for model in self._models.values()), self._collect_server()):
            known = families.setdefault(metric.name, metric)
            if known is not metric:
                known.samples += metric.samples
        return iter(families.values())

    def _collect_server(self) -> Iterator[Metric]:
        first_name = next(iter(self._models))
        first = self._models[first_name].labels
        for name, counts in self._http.items() or [(first_name, Counter())]:
            labels, text = self._models[name].labels, "HTTP requests answered"
            rows = [({"route": r, "method": m, "status": s}, count) for (r, m, s), count in counts.items()]
            yield labels.family(CounterMetricFamily, "quire:http_requests", text, rows)
        text = "Requests refused with status 429, by reason"
        yield first.split(CounterMetricFamily, "quire:requests_refused", text, "reason", self._refused())
        yield process_memory(first, "server", "self")


def _asks_for_openmetrics(accept: str) -> bool:
    """Whether the header lists OpenMetrics 1.0.0, or no version of it."""
    for kind in accept.split(","):
        name, *parameters = [part.strip() for part in kind.split(";")]
        versions = [text.partition("=")[2] for text in parameters if text.startswith("version=")]
        if name == "application/openmetrics-text" and versions in ([], ["1.0.0"]):
            return True
    return False


async def _get_metrics(request: Request) -> Response:
    metrics = state_of(request).metrics
    assert metrics is not None  # this endpoint is only served where metrics are collected
    body, content_type = metrics.render(request.headers.get("accept"))
    return Response(body, headers={"content-type": content_type})


METRICS_ENDPOINT = Endpoint(
    "/metrics", "GET", _get_metrics, "Metrics in Prometheus' format", media_type="text/plain", kind="metrics"
)
