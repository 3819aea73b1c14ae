"""How much runs at once."""

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The budgets of one step."""

    max_num_seqs: int
    """sequences that run at once, at most"""
    max_num_batched_tokens: int
    """tokens computed in one step, at most; longer prompts are computed in chunks"""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
