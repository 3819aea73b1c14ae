"""Prometheus metrics: vLLM's names, which dashboards and load generators scrape already, and our own beside them.

Nothing is formatted before it is scraped. A token costs a list increment: counts are kept in plain lists, and a
collector makes metric families of them and of the engine's latest stats. The registry is this object's own.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from quire.common.outputs import EngineStats, RequestMetrics
from quire.config.cache import CacheConfig
from quire.server.http.endpoint import Endpoint
from quire.server.http.state import RequestContext, state_of

_LATENCIES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_DURATIONS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token", _LATENCIES),
    "inter_token_latency_seconds": ("Time between two tokens of a request, as received by the server", _LATENCIES),
    "time_per_output_token_seconds": ("Older name of vllm:inter_token_latency_seconds", _LATENCIES),
    "request_time_per_output_token_seconds": ("Mean time per token of a request, after its first token", _LATENCIES),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end", _DURATIONS),
    "request_queue_time_seconds": ("Time from a request's arrival in the engine to its first step", _DURATIONS),
    "request_prefill_time_seconds": ("Time from a request's first step to its first token", _DURATIONS),
    "request_decode_time_seconds": ("Time from a request's first token to its end", _DURATIONS),
    "request_inference_time_seconds": ("Time from a request's first step to its end", _DURATIONS),
    "request_prompt_tokens": ("Number of prompt tokens of a request", _COUNTS),
    "request_generation_tokens": ("Number of tokens generated for a request", _COUNTS),
    "request_max_num_generation_tokens": ("Number of tokens of a request's longest output", _COUNTS),
    "request_params_n": ("Number of samples (n) of a request", (1, 2, 5, 10, 20, 50, 100)),
    "request_params_max_tokens": ("max_tokens of a request", _COUNTS),
    "iteration_tokens_total": ("Tokens of a step: of completed prefills, and generated", _STEP_TOKENS),
}
_GAUGES: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Number of requests that are running", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Number of requests in the queue", lambda s: s.num_waiting),
    "vllm:num_requests_swapped": ("Number of requests that are swapped out", lambda s: s.num_swapped),
    "vllm:kv_cache_usage_perc": ("Fraction of KV cache blocks in use, 0 to 1", lambda s: s.kv_cache_usage),
    "quire:kv_cache_pinned_blocks": ("KV cache blocks that are pinned", lambda s: s.num_pinned_blocks),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_preemptions": ("Preempted requests", lambda s: s.num_preemptions),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.num_prefix_queried_tokens,
    ),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.num_prefix_hit_tokens),
    "vllm:prompt_tokens": ("Prompt tokens, including cached ones", lambda s: s.num_prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated", lambda s: s.num_generated_tokens),
    "quire:engine_steps": ("Number of engine steps", lambda s: s.num_steps),
    "quire:swapped_blocks": ("Blocks copied to or from the host tier", lambda s: s.num_swapped_blocks),
    "quire:prefix_cache_evicted_tokens": ("Cached tokens evicted", lambda s: s.prefix_cache["evicted"]),
    "quire:prefix_cache_spilled_tokens": ("Cached tokens moved to the host tier", lambda s: s.prefix_cache["spilled"]),
}
FINISHED_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts by bucket. Used by one thread only, so it needs no lock."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not exceed."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: bound and how many values are at most that."""
        total, rows = 0, []
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


@dataclass(slots=True)
class _Live:
    """A request that is running."""

    start: float
    last: float
    num_prompt_tokens: int
    num_tokens: int = 0
    first: float | None = None


class Metrics:
    """All metrics since the server started. A RequestListener, called only in the event loop's thread."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        *,
        is_running: Callable[[], bool] = lambda: True,
        recoveries: Callable[[], tuple[int, int]] = lambda: (0, 0),
        refused: Callable[[], Mapping[str, int]] = dict,
        cache: CacheConfig | None = None,
        engine_pid: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The functions are called at each scrape. `recoveries` returns the number of engines started after the first
        and of requests continued in another engine; `refused` returns the number of refused requests by reason."""
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = stats
        self._is_running = is_running
        self._recoveries = recoveries
        self._refused = refused
        self._cache = cache
        self._engine_pid = engine_pid
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._step_tokens: int | None = None
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._http: Counter[tuple[str, str, str]] = Counter()
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._between_tokens = self.histograms["inter_token_latency_seconds"]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics and their content type: OpenMetrics if the `Accept` header asks for it, else Prometheus' text."""
        encoder, content_type = choose_encoder(accept or "")
        return encoder(self.registry), content_type

    def on_step(self, stats: EngineStats) -> None:
        """The engine has completed a step."""
        total = stats.num_prompt_tokens + stats.num_generated_tokens
        if self._step_tokens is not None and total > self._step_tokens:
            self.histograms["iteration_tokens_total"].observe(total - self._step_tokens)
        self._step_tokens = total

    def on_request_start(self, request_id: str, num_prompt_tokens: int, params: Any) -> None:
        """A request is sent to the engine."""
        now = self._clock()
        self._live[request_id] = _Live(now, now, num_prompt_tokens)
        self.histograms["request_params_n"].observe(getattr(params, "n", 1))
        if max_tokens := getattr(params, "max_tokens", None):
            self.histograms["request_params_max_tokens"].observe(max_tokens)

    def on_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """A step generated tokens of a request. It counts as one interval, also for several samples or tokens."""
        live = self._live.get(request_id)
        if live is None:
            return
        if live.first is None:
            live.first = now
            self.histograms["time_to_first_token_seconds"].observe(now - live.start)
        else:
            self._between_tokens.observe(now - live.last)
        live.last = now
        live.num_tokens += num_tokens

    def on_request_end(
        self, request_id: str, metrics: RequestMetrics, num_cached_tokens: int, reason: str, longest: int
    ) -> None:
        """A request has ended, successfully or not."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._finished[reason if reason in self._finished else "error"] += 1
        self._observe("e2e_request_latency_seconds", self._clock() - live.start)
        self._observe("request_prompt_tokens", live.num_prompt_tokens)
        self._observe("request_generation_tokens", live.num_tokens)
        self._observe("request_max_num_generation_tokens", longest)
        if live.first is not None and live.num_tokens > 1:
            self._observe("request_time_per_output_token_seconds", (live.last - live.first) / (live.num_tokens - 1))
        if metrics.first_scheduled_time is None:
            return
        started, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
        self._observe("request_queue_time_seconds", started - metrics.arrival_time)
        if first is not None:
            self._observe("request_prefill_time_seconds", first - started)
        if end is not None:
            self._observe("request_inference_time_seconds", end - started)
        if first is not None and end is not None:
            self._observe("request_decode_time_seconds", end - first)

    def on_http_response(self, context: RequestContext) -> None:
        """The response to an HTTP request is complete."""
        self._http[context.route, context.method, str(context.status)] += 1

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(max(0.0, value))

    def collect(self) -> Iterator[Metric]:
        """The current metrics; called by prometheus-client."""
        stats = self._stats()
        for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, value) in table.items():
                yield self._single(family, name, text, value(stats))
        text = "Finished requests, by reason"
        yield self._split(CounterMetricFamily, "vllm:request_success", text, "finished_reason", self._finished)
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = self._between_tokens if name == "time_per_output_token_seconds" else self.histograms[name]
            metric = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
            yield metric
        if self._cache is not None:
            info = _cache_info(self._cache, stats.num_blocks)
            yield self._family(
                GaugeMetricFamily, "vllm:cache_config_info", "Configuration of the KV cache", [(info, 1)]
            )
        yield from self._collect_cache(stats)
        yield from self._collect_server()

    def _collect_cache(self, stats: EngineStats) -> Iterator[Metric]:
        blocks = {
            "owned": stats.num_used_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_blocks - stats.num_used_blocks - stats.num_cached_blocks,
        }
        yield self._split(GaugeMetricFamily, "quire:kv_cache_blocks", "KV cache blocks, by state", "state", blocks)
        for kind, label, text in (("hit", "source", "found, by source"), ("missed", "reason", "not found, by reason")):
            found = {n.removeprefix(f"{kind}_"): v for n, v in stats.prefix_cache.items() if n.startswith(f"{kind}_")}
            name, text = f"quire:prefix_cache_{kind}_tokens", f"Tokens looked up in the prefix cache and {text}"
            yield self._split(CounterMetricFamily, name, text, label, found)

    def _collect_server(self) -> Iterator[Metric]:
        is_running = self._is_running()
        yield self._single(GaugeMetricFamily, "quire:engine_up", "1 if the engine process runs", int(is_running))
        names = {
            "engine_restarts": "Engine processes started after the first",
            "requests_replayed": "Requests continued in another engine process",
        }
        for (name, text), count in zip(names.items(), self._recoveries(), strict=True):
            yield self._single(CounterMetricFamily, f"quire:{name}", text, count)
        rows = [({"route": r, "method": m, "status": s}, count) for (r, m, s), count in self._http.items()]
        yield self._family(CounterMetricFamily, "quire:http_requests", "HTTP requests answered", rows)
        text = "Requests refused with status 429, by reason"
        yield self._split(CounterMetricFamily, "quire:requests_refused", text, "reason", self._refused())
        pid = self._engine_pid()
        pids = {"server": "self"} | ({} if pid is None else {"engine": str(pid)})
        memory = {name: size for name, pid in pids.items() if (size := _resident_bytes(pid)) is not None}
        text = "Resident memory, by process"
        yield self._split(GaugeMetricFamily, "quire:process_memory_bytes", text, "process", memory)

    def _split(self, kind: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """A metric family with one row for each value of an additional label."""
        return self._family(kind, name, text, [({label: key}, value) for key, value in values.items()])

    def _single(self, kind: Any, name: str, text: str, value: float) -> Metric:
        return self._family(kind, name, text, [({}, value)])

    def _family(self, kind: Any, name: str, text: str, rows: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        """A metric family with one row for each set of additional labels."""
        extra = list(rows[0][0]) if rows else []
        metric: Metric = kind(name, text, labels=[*self._labels, *extra])
        for labels, value in rows:
            metric.add_metric([*self._labels.values(), *labels.values()], value)  # type: ignore[attr-defined]
        return metric


def _cache_info(cache: CacheConfig, num_blocks: int) -> dict[str, str]:
    """Labels as vLLM's, which routers read: the cache's size in tokens is block_size times num_gpu_blocks."""
    info: dict[str, object] = {
        "block_size": cache.block_size,
        "num_gpu_blocks": num_blocks,
        "cache_dtype": cache.dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.memory_utilization,
        "swap_space_bytes": cache.swap_bytes,
    }
    return {name: str(value) for name, value in info.items()}


async def _get_metrics(request: Request) -> Response:
    metrics = state_of(request).metrics
    assert metrics is not None  # this endpoint is only served where metrics are collected
    body, content_type = metrics.render(request.headers.get("accept"))
    return Response(body, headers={"content-type": content_type})


METRICS_ENDPOINT = Endpoint(
    "/metrics", "GET", _get_metrics, "Metrics in Prometheus' format", media_type="text/plain", kind="metrics"
)


def _resident_bytes(pid: str) -> int | None:
    """Resident memory of a process, or None if it is unknown."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * 4096
