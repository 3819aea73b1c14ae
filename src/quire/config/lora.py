"""Configuration of LoRA adapters."""

from dataclasses import dataclass

from quire.common.errors import ConfigError

_MOST_LORAS = 4096
_MOST_RANK = 512


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """How many adapters a worker holds, and how large they may be."""

    max_loras: int
    """Number of slots: adapters that are loaded at once."""
    max_lora_rank: int
    """Largest rank of an adapter."""
    max_bytes: int | None = None
    """Memory for all of them; None for that of `max_loras` adapters of the largest rank on all projections."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_loras <= _MOST_LORAS:
            raise ConfigError(f"max_loras={self.max_loras}: must be from 1 to {_MOST_LORAS} adapters")
        if not 1 <= self.max_lora_rank <= _MOST_RANK:
            raise ConfigError(f"max_lora_rank={self.max_lora_rank}: must be from 1 to {_MOST_RANK}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"lora_memory={self.max_bytes}: must be at least 1 byte")
