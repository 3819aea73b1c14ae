"""vLLM's module of the forms of a prompt."""

from quire.engine.requests.input_processor import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
