"""vLLM's package of engines."""
