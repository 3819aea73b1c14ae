"""vLLM's package of sampling."""
