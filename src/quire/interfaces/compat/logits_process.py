"""vLLM's module of logits processors that belong to a request: functions of (output token ids, logits)."""

from quire.runner.sampling.named_processor import LogitsProcessor

__all__ = ["LogitsProcessor"]
