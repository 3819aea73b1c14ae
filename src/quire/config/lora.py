"""Configuration of LoRA adapters."""

from dataclasses import dataclass

from quire.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """How many adapters may be loaded at once, and how large they may be."""

    max_loras: int
    """Number of slots: adapters that are loaded at once."""
    max_lora_rank: int
    """Largest rank of an adapter."""
    max_bytes: int | None
    """Memory for all loaded adapters together; None for what `max_loras` of the largest rank take."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_loras <= 1024:
            raise ConfigError(f"max_loras={self.max_loras}: must be from 1 to 1024")
        if not 1 <= self.max_lora_rank <= 1024:
            raise ConfigError(f"max_lora_rank={self.max_lora_rank}: must be from 1 to 1024")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"lora_memory={self.max_bytes}: must be at least 1 byte")
