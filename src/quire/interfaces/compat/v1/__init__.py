"""vLLM's package of its present engine."""
