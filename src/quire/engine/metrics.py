"""Metrics of an engine under vLLM's names: what `LLM.get_metrics` returns and a server exports.

A token costs a list increment: counts are kept in plain lists, and metrics are made of them when they are asked for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.common.outputs import EngineStats, RequestMetrics
from quire.config.cache import CacheConfig
from quire.config.lora import LoRAConfig

if TYPE_CHECKING:
    from quire.engine.requests.sequence import SequenceGroup


@dataclass
class Metric:
    """A value at one moment, for one set of labels. The names of these classes and their fields are vLLM's."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that may also fall."""

    value: float


@dataclass
class Vector(Metric):
    """Counters by position. A server exports each with the label `position`."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """How values are distributed."""

    count: int
    sum: float
    buckets: dict[str, int]
    """For each bound, the last of which is `+Inf`, the number of values that are at most that."""


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
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.num_prefix_queried_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.num_prefix_hit_tokens),
    "vllm:prompt_tokens": ("Prompt tokens, including cached ones", lambda s: s.num_prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated", lambda s: s.num_generated_tokens),
    "quire:engine_steps": ("Number of engine steps", lambda s: s.num_steps),
    "quire:swapped_blocks": ("Blocks copied to or from the host tier", lambda s: s.num_swapped_blocks),
    "quire:prefix_cache_evicted_tokens": ("Cached tokens evicted", lambda s: s.prefix_cache["evicted"]),
    "quire:prefix_cache_spilled_tokens": ("Cached tokens moved to the host tier", lambda s: s.prefix_cache["spilled"]),
}
_BY_LABEL: Mapping[tuple[str, str], Mapping[str, tuple[str, type[Counter] | type[Gauge], Callable[[Any], int]]]] = {
    ("lora_name", "adapters"): {
        "quire:lora_requests_running": ("Requests that have started, by LoRA adapter", Gauge, lambda a: a.num_running),
        "quire:lora_requests_waiting": (
            "Requests that have not started, by LoRA adapter", Gauge, lambda a: a.num_waiting,
        ),
        "quire:lora_prompt_tokens": (
            "Prompt tokens of requests that have ended, by LoRA adapter", Counter, lambda a: a.num_prompt_tokens,
        ),
        "quire:lora_generation_tokens": (
            "Tokens generated for requests that have ended, by LoRA adapter", Counter, lambda a: a.num_generated_tokens,
        ),
    },
    ("drafter", "drafts"): {
        "vllm:spec_decode_num_drafts": (
            "How often drafts of a sequence were verified", Counter, lambda d: d.num_drafts,
        ),
        "vllm:spec_decode_num_draft_tokens": ("Drafts that were verified", Counter, lambda d: d.num_tokens),
        "vllm:spec_decode_num_accepted_tokens": ("Drafts that were right", Counter, lambda d: d.num_accepted),
    },
    ("tenant", "tenant_drafts"): {
        "quire:tenant_draft_tokens": ("Drafts that were verified, by tenant", Counter, lambda d: d.num_tokens),
        "quire:tenant_accepted_draft_tokens": ("Drafts that were right, by tenant", Counter, lambda d: d.num_accepted),
    },
}  # fmt: skip
"""By a label of their own, and the name of what the engine counts for each of its values."""
_DRAFTS_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_DRAFTING_ERRORS = "quire:drafting_errors"
FINISHED_REASONS = ("stop", "length", "abort", "error")


class BucketCounts:
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

    def cumulative(self) -> dict[str, int]:
        """For each bound, the number of values that are at most that."""
        total, buckets = 0, {}
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        return buckets


@dataclass(slots=True)
class _Live:
    """A request that is running."""

    start: float
    last: float
    num_prompt_tokens: int
    num_tokens: int = 0
    first: float | None = None


class EngineMetrics:
    """All metrics of an engine since it started. A RequestListener, called by one thread only."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._step_tokens = 0
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.histograms = {name: BucketCounts(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._between_tokens = self.histograms["inter_token_latency_seconds"]

    def observe(self, groups: Sequence[SequenceGroup], total_tokens: int) -> None:
        """These requests have changed, and the engine has processed `total_tokens` so far: for an engine in this
        process, in place of the listener's methods."""
        now = self._clock()
        self._observe_step(total_tokens)
        for group in groups:
            name, live = group.request_id, self._live.get(group.request_id)
            if live is None:
                self.on_request_start(name, len(group.outputs.prompt_token_ids), group.params)
                live = self._live[name]
                live.start = group.metrics.arrival_time
            first, *others = group.seqs
            num_tokens = len(first.output.token_ids) + sum([len(seq.output.token_ids) for seq in others])
            if num_tokens > live.num_tokens:
                self.on_tokens(name, num_tokens - live.num_tokens, now)
            if first.output.finish_reason is not None and group.is_finished:
                reason = "error" if group.has_failed else first.output.finish_reason
                longest = max(seq.num_output_tokens for seq in group.seqs)
                self.on_request_end(name, group.metrics, group.num_cached_tokens, reason, longest)

    def on_step(self, stats: EngineStats) -> None:
        """The engine has completed a step."""
        self._observe_step(stats.num_prompt_tokens + stats.num_generated_tokens)

    def _observe_step(self, total: int) -> None:
        if total > self._step_tokens:
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

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(max(0.0, value))

    def snapshot(
        self, stats: Sequence[EngineStats], cache: CacheConfig, lora: LoRAConfig | None = None
    ) -> Iterator[Metric]:
        """The current metrics, with the statistics of each engine and its cache; those of one name follow each other.

        What is measured of requests, the histograms, is one for all engines.
        """
        engines = [(self.labels | {"engine": str(number)}, of) for number, of in enumerate(stats)]
        for name, (_, gauge) in _GAUGES.items():
            yield from (Gauge(name, labels, gauge(of)) for labels, of in engines)
        for name, (_, counter) in _COUNTERS.items():
            yield from (Counter(name, labels, int(counter(of))) for labels, of in engines)
        yield from _split(Counter, "vllm:request_success", "finished_reason", [(self.labels, self._finished)])
        for name in _HISTOGRAMS:
            counts = self._between_tokens if name == "time_per_output_token_seconds" else self.histograms[name]
            buckets = counts.cumulative()
            yield Histogram(f"vllm:{name}", dict(self.labels), buckets["+Inf"], counts.sum, buckets)
        yield from (
            Gauge("vllm:cache_config_info", labels | _cache_info(cache, of.num_blocks), 1) for labels, of in engines
        )
        yield from _split(Gauge, "quire:kv_cache_blocks", "state", [(labels, _blocks(of)) for labels, of in engines])
        for kind, label in (("hit", "source"), ("missed", "reason")):
            found = [(labels, _without_prefix(of.prefix_cache, f"{kind}_")) for labels, of in engines]
            yield from _split(Counter, f"quire:prefix_cache_{kind}_tokens", label, found)
        if lora is not None:
            now = time.time()
            yield from (Gauge("vllm:lora_requests_info", labels | _lora_info(of, lora), now) for labels, of in engines)
        for (label, counted), table in _BY_LABEL.items():
            for name, (_, metric, read) in table.items():
                found = [(labels, {key: read(c) for key, c in getattr(of, counted).items()}) for labels, of in engines]
                yield from _split(metric, name, label, found)
        errors = [(labels, of.drafting_errors) for labels, of in engines]
        yield from _split(Counter, _DRAFTING_ERRORS, "drafter", errors)
        for labels, of in engines:
            for drafter, drafts in of.drafts.items():
                yield Vector(_DRAFTS_BY_POSITION, labels | {"drafter": drafter}, drafts.num_accepted_at)


def _split(
    kind: type[Counter] | type[Gauge],
    name: str,
    label: str,
    engines: Sequence[tuple[Mapping[str, str], Mapping[str, int]]],
) -> Iterator[Metric]:
    """A metric for each value of an additional label, of each engine."""
    for labels, values in engines:
        for key, value in values.items():
            yield kind(name, {**labels, label: key}, value)


def _blocks(stats: EngineStats) -> dict[str, int]:
    """The number of blocks in each state."""
    return {
        "owned": stats.num_used_blocks,
        "cached": stats.num_cached_blocks,
        "free": stats.num_blocks - stats.num_used_blocks - stats.num_cached_blocks,
    }


def _without_prefix(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counts whose names have the prefix, by the rest of the name."""
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


HELP: Mapping[str, str] = {
    **{name: text for table in (_GAUGES, _COUNTERS) for name, (text, _) in table.items()},
    **{name: text for table in _BY_LABEL.values() for name, (text, *_) in table.items()},
    _DRAFTS_BY_POSITION: "Drafts that were right, by position among the drafts of a sequence, from 0",
    _DRAFTING_ERRORS: "Exceptions that cost drafts and nothing else, by drafter; empty: in no drafter",
    "vllm:lora_requests_info": "LoRA adapters of unfinished requests in the labels; the value is the time",
    **{f"vllm:{name}": text for name, (text, _) in _HISTOGRAMS.items()},
    "vllm:request_success": "Finished requests, by reason",
    "vllm:cache_config_info": "Configuration of the KV cache",
    "quire:kv_cache_blocks": "KV cache blocks, by state",
    "quire:prefix_cache_hit_tokens": "Tokens looked up in the prefix cache and found, by source",
    "quire:prefix_cache_missed_tokens": "Tokens looked up in the prefix cache and not found, by reason",
}
"""What each metric means."""


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


def _lora_info(stats: EngineStats, lora: LoRAConfig) -> dict[str, str]:
    """Labels as vLLM's, which routers read: the names of adapters, separated by commas."""
    return {
        "running_lora_adapters": ",".join(name for name, counts in stats.adapters.items() if counts.num_running),
        "waiting_lora_adapters": ",".join(name for name, counts in stats.adapters.items() if counts.num_waiting),
        "max_lora": str(lora.max_loras),
    }
