"""vLLM's module of logits processors that belong to an engine: `LLM(logits_processors=[...])`."""

from quire.interfaces.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
)

__all__ = [
    "AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "RequestLogitsProcessor",
]  # fmt: skip
