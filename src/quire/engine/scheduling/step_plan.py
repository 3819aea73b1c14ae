"""A step while it is planned: the budgets that are left, and what has been scheduled."""

from collections.abc import Set

import msgspec

from quire.engine.requests.sequence import Sequence, SequenceGroup


class StepPlan(msgspec.Struct):
    """Budgets that shrink as sequences are scheduled. The scheduler alone changes it, within one `schedule`."""

    token_budget: int
    prefill_budget: int
    """The part of the token budget that sequences with more than one token to compute may have."""
    num_seqs: int = 0
    """Sequences that run, or will once their prompts are computed."""
    scheduled: list[tuple[SequenceGroup, Sequence, int]] = []
    """Each scheduled sequence with its request and its number of tokens, drafts not counted."""
    drafts: dict[int, tuple[int, ...]] = {}
    """By sequence id, the drafts that are verified behind its tokens."""
    only: Set[SequenceGroup] | None = None
    """The requests that may run; None for all."""
    busy: Set[SequenceGroup] = frozenset()
    """Requests in a batch that is in flight: they are neither scheduled nor preempted."""
    preempted: bool = False
    """A request was preempted in this step, so no other starts."""

    def allows(self, group: SequenceGroup) -> bool:
        """Whether the request may run in this step."""
        return (self.only is None or group in self.only) and group not in self.busy

    def chunk(self, seq: Sequence) -> int:
        """How many tokens the sequence may compute; 0 if it must run whole and this step has no room for it."""
        num_tokens = len(seq.token_ids) - seq.num_computed_tokens
        if seq.is_whole:
            fits = num_tokens <= self.token_budget and (num_tokens <= self.prefill_budget or not self.scheduled)
            return num_tokens if fits else 0
        return min(num_tokens, self.token_budget, self.prefill_budget if num_tokens > 1 else num_tokens)

    def is_full(self, max_num_seqs: int, num_wanted: int) -> bool:
        """Whether `num_wanted` more sequences are too many, or no tokens are left for them."""
        return self.token_budget <= 0 or self.prefill_budget <= 0 or self.num_seqs + num_wanted > max_num_seqs

    def add(self, group: SequenceGroup, seq: Sequence, num_tokens: int) -> None:
        """Schedule the sequence's next tokens."""
        self.scheduled.append((group, seq, num_tokens))
        self.token_budget -= num_tokens
        if len(seq.token_ids) - seq.num_computed_tokens > 1:
            self.prefill_budget -= num_tokens
