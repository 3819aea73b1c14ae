"""The metrics of one model in Prometheus' format: the engine's, and whether it is loaded and runs.

Nothing is formatted before it is scraped.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from quire.engine import metrics as of_engine

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM


class Labels:
    """The labels that all metrics of a model have, and metric families with them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._common = labels

    def split(self, kind: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """A metric family with one row for each value of an additional label."""
        return self.family(kind, name, text, [({label: key}, value) for key, value in values.items()])

    def single(self, kind: Any, name: str, text: str, value: float) -> Metric:
        """A metric family with one row."""
        return self.family(kind, name, text, [({}, value)])

    def family(self, kind: Any, name: str, text: str, rows: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        """A metric family with one row for each set of additional labels."""
        extra = rows[0][0] if rows else {}
        metric: Metric = kind(name, text, labels=list({**self._common, **extra}))
        for labels, value in rows:
            metric.add_metric(list({**self._common, **labels}.values()), value)  # type: ignore[attr-defined]
        return metric


class ModelMetrics:
    """The metrics of a model since the server started. Used only in the event loop's thread."""

    def __init__(
        self,
        name: str,
        llm: Callable[[], AsyncLLM | None],
        *,
        is_loaded: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The functions are called at each scrape; `llm` returns None as long as the model was never loaded."""
        self.engine = of_engine.EngineMetrics(name, clock)
        """The engine's metrics, which listens to its requests."""
        self.labels = Labels(self.engine.labels)
        self._llm = llm
        self._is_loaded = is_loaded

    def collect(self) -> Iterator[Metric]:
        """The current metrics. Of a model that was never loaded, only that it is not."""
        llm = self._llm()
        is_loaded = llm is not None and self._is_loaded()
        text = "1 if weights and cache are in memory"
        yield self.labels.single(GaugeMetricFamily, "quire:model_loaded", text, int(is_loaded))
        if llm is None:
            return
        metrics = self.engine.snapshot(llm.group.stats, llm.config.cache, llm.config.lora)
        for name, of_name in groupby(metrics, key=lambda metric: metric.name):
            yield _engine_family(name, list(of_name))
        if is_loaded:
            text, running = "1 if the engine process runs", enumerate(map(float, llm.group.running))
            by_engine = {str(number): runs for number, runs in running}
            yield self.labels.split(GaugeMetricFamily, "quire:engine_up", text, "engine", by_engine)
        text = "Engine processes started after the first"
        yield self.labels.single(CounterMetricFamily, "quire:engine_restarts", text, llm.num_restarts)
        text = "Requests continued in another engine process"
        yield self.labels.single(CounterMetricFamily, "quire:requests_replayed", text, llm.num_replayed)
        for number, pid in enumerate(llm.group.pids):
            yield process_memory(self.labels, f"engine {number}" if number else "engine", str(pid))


def _engine_family(name: str, metrics: Sequence[of_engine.Metric]) -> Metric:
    """The engine's metrics of one name, in Prometheus' form."""
    first, text, labels = metrics[0], of_engine.HELP[name], list(metrics[0].labels)
    if isinstance(first, of_engine.Histogram):
        histogram = HistogramMetricFamily(name, text, labels=labels)
        buckets = [(bound, float(count)) for bound, count in first.buckets.items()]
        histogram.add_metric(list(first.labels.values()), buckets, first.sum)
        return histogram
    if isinstance(first, of_engine.Vector):
        parts = (vector for vector in metrics if isinstance(vector, of_engine.Vector))
        metrics = [
            of_engine.Counter(name, vector.labels | {"position": str(position)}, value)
            for vector in parts
            for position, value in enumerate(vector.values)
        ]
        first, labels = metrics[0], [*labels, "position"]
    kind = CounterMetricFamily if isinstance(first, of_engine.Counter) else GaugeMetricFamily
    family: Any = kind(name, text, labels=labels)
    for metric in metrics:
        family.add_metric(list(metric.labels.values()), metric.value)  # type: ignore[attr-defined]
    result: Metric = family
    return result


def process_memory(labels: Labels, process: str, pid: str) -> Metric:
    """The resident memory of a process; no row if it is unknown."""
    size = resident_bytes(pid)
    rows = {} if size is None else {process: size}
    text = "Resident memory, by process"
    return labels.split(GaugeMetricFamily, "quire:process_memory_bytes", text, "process", rows)


def resident_bytes(pid: str) -> int | None:
    """Resident memory of a process, or None if it is unknown."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * mmap.PAGESIZE
