"""vLLM's module of a helper for logits processors."""

from quire.interfaces.logits_processors import process_dict_updates

__all__ = ["process_dict_updates"]
