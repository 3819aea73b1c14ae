"""vLLM's module of LLMEngine."""

from quire.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
