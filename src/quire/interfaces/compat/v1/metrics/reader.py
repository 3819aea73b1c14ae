"""vLLM's module of the metrics that `LLM.get_metrics` returns."""

from quire.engine.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
