"""vLLM's package of metrics."""
