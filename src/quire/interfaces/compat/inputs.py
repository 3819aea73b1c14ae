"""vLLM's module of the forms of a prompt."""

from quire.interfaces.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
