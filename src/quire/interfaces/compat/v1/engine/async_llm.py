"""vLLM's module of AsyncLLM."""

from quire.interfaces.async_llm.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
