"""vLLM's module of LLM."""

from quire.interfaces.llm import LLM

__all__ = ["LLM"]
