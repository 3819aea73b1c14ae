"""vLLM's package of LoRA adapters."""
