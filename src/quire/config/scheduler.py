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
    preemption_mode: str | None = None
    """`swap`, `recompute`, or None: swap while the host tier has room"""

    def __post_init__(self) -> None:
        if self.preemption_mode not in (None, "swap", "recompute"):
            raise ConfigError(f"preemption_mode={self.preemption_mode!r}: must be 'swap', 'recompute' or None")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
