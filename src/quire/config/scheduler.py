"""Configuration of the scheduler: the limits of a step and the order of requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.common.errors import ConfigError, check_choice

POLICIES = ("fcfs", "priority", "fair", "prefix")
_MIN, _MAX = 1e-6, 1e6
"""Range of weights and times. With a smaller weight, adding one token to a tenant's usage could leave it unchanged."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step and the order of requests."""

    max_num_seqs: int
    """Largest number of sequences that run at once."""
    max_num_batched_tokens: int
    """Largest number of tokens computed in one step; longer prompts are computed in chunks."""
    preemption_mode: str | None = None
    """`swap`, `recompute`, or None for the one with the lower estimated cost."""
    policy: str = "fcfs"
    """Scheduling policy, one of POLICIES."""
    priority_aging_s: float = 10.0
    """Policy `priority`: seconds of waiting that count as much as one level."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Policy `fair`: each tenant's share in proportion to the others; 1 for a tenant not listed."""
    prefix_max_delay_s: float = 2.0
    """Policy `prefix`: largest delay, in seconds, of a request by later requests."""
    target_step_ms: float | None = None
    """Prompts are split into chunks so small that a step takes about this long; None for no limit on its time."""
    max_draft_rows: int = 0
    """Drafts that a step may verify while max_num_seqs sequences run; with fewer sequences, so many more."""

    def __post_init__(self) -> None:
        if self.preemption_mode not in (None, "swap", "recompute"):
            raise ConfigError(f"preemption_mode={self.preemption_mode!r}: must be 'swap', 'recompute' or None")
        check_choice("scheduling_policy", self.policy, POLICIES)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if not 1 <= (value := getattr(self, name)) < 2**31:
                raise ConfigError(f"{name}={value}: must be at least 1{'' if value < 1 else ' and below 2**31'}")
        self._check_range("priority_aging_s", self.priority_aging_s, _MIN)
        self._check_range("prefix_max_delay_s", self.prefix_max_delay_s, 0)
        if self.target_step_ms is not None:
            self._check_range("target_step_ms", self.target_step_ms, _MIN)
        for tenant, weight in self.tenant_weights.items():
            self._check_range(f"tenant_weights[{tenant!r}]", weight, _MIN)

    @staticmethod
    def _check_range(name: str, value: object, low: float) -> None:
        if not isinstance(value, int | float) or not low <= value <= _MAX:
            raise ConfigError(f"{name}={value!r}: must be a number from {low:g} to {_MAX:g}")
