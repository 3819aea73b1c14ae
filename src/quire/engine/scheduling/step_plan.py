"""A Batch in the making: what a step has left to give, and what it has given."""

from collections.abc import Set
from dataclasses import dataclass, field

from quire.engine.requests.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class StepPlan:
    """Budgets that shrink as sequences are scheduled. The scheduler alone changes it, within one `schedule`."""

    token_budget: int
    prefill_budget: int
    """of the token budget, what sequences with more than one token to compute may have"""
    num_seqs: int = 0
    """running or about to, once their prompts are computed"""
    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    """with how many tokens"""
    only: Set[SequenceGroup] | None = None
    """requests that may run; None: all"""
    preempted: bool = False
    """somebody had to give way, so nobody else starts"""

    def chunk(self, seq: Sequence) -> int:
        """How many tokens the sequence may compute."""
        num_tokens = len(seq.token_ids) - seq.num_computed_tokens
        return min(num_tokens, self.token_budget, self.prefill_budget if num_tokens > 1 else 1)

    def is_full(self, max_num_seqs: int, num_wanted: int) -> bool:
        """Whether so many more sequences are too many, or there are no tokens for them."""
        return self.token_budget <= 0 or self.prefill_budget <= 0 or self.num_seqs + num_wanted > max_num_seqs

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedule the sequence's next tokens."""
        self.scheduled.append((seq, num_tokens))
        self.token_budget -= num_tokens
        if num_tokens > 1 or len(seq.token_ids) - seq.num_computed_tokens > 1:
            self.prefill_budget -= num_tokens
