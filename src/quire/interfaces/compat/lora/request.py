"""vLLM's module of LoRARequest."""

from quire.common.lora import LoRARequest

__all__ = ["LoRARequest"]
