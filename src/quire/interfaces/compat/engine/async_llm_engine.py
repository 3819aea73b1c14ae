"""vLLM's module of AsyncLLMEngine."""

from quire.interfaces.async_llm.async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
