"""Preemption: which running requests give up their blocks when blocks run out, and in which way."""

import math
from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass, replace

from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.step_time import StepTimeModel
from quire.engine.scheduling.unfinished import UnfinishedRequests

MAX_CANDIDATES = 8
"""Largest number of requests, the newest of those that may be preempted, whose costs are compared."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A way to preempt one request: the cheapest of those that are allowed and possible."""

    group: SequenceGroup
    by_swap: bool
    cost_s: float
    """Estimated time until the request is where it was before."""
    num_freed_blocks: int


class Preemptor:
    """Takes the blocks of running requests, which continue later where they were.

    The blocks are swapped to the host tier, or they are freed and their tokens computed again. The way that costs less
    is taken: the time of computing is known from the measured speed, that of copying from `block_copy_s`.
    """

    def __init__(
        self, config: SchedulerConfig, requests: UnfinishedRequests, step_time: StepTimeModel, block_copy_s: float
    ) -> None:
        """`block_copy_s`: seconds to copy one block in one direction."""
        self.num_preemptions = 0
        self.num_preemptions_by_swap = 0
        self._mode = config.preemption_mode
        self._requests = requests
        self._blocks = requests.blocks
        self._step_time = step_time
        self._block_copy_s = block_copy_s

    def estimate(self, group: SequenceGroup) -> Preemption:
        """The cheaper way for a running request. Tokens in blocks that others hold as well stay in the cache."""
        seqs = group.seqs_in(SequenceStatus.RUNNING)
        seq_ids = [seq.seq_id for seq in seqs]
        num_freed, num_held = self._blocks.gain(seq_ids)
        num_tokens = sum(seq.num_computed_tokens for seq in seqs)
        recompute_s = self._step_time.seconds_per_token * num_tokens * num_freed / max(1, num_held)
        swap_s = 2 * self._block_copy_s * num_held
        by_swap = self._mode != "recompute" and num_held > 0 and self._blocks.can_swap_out(seq_ids)
        if self._mode is None and 0 < recompute_s < swap_s:
            by_swap = False
        return Preemption(group, by_swap, swap_s if by_swap else recompute_s, num_freed)

    def cheapest(self, groups: SequenceOf[SequenceGroup]) -> Preemption:
        """Of these, oldest first, the one that costs least for each block it frees; the newest of equals."""
        estimates = [self.estimate(group) for group in groups[-MAX_CANDIDATES:]]
        return min(reversed(estimates), key=lambda e: e.cost_s / e.num_freed_blocks if e.num_freed_blocks else math.inf)

    def preempt(self, group: SequenceGroup, *, may_swap: bool = True) -> None:
        """Preempt a running request that is in no batch in flight. Unless it `may_swap`, its tokens are recomputed."""
        assert group not in self._requests.busy(), f"request {group.request_id!r} is in a batch that is in flight"
        preemption = self.estimate(group)
        self._carry_out(preemption if may_swap else replace(preemption, by_swap=False))

    def preempt_behind(self, index: int, busy: Set[SequenceGroup]) -> bool:
        """Preempt one of the requests behind place `index` of those that run, the last ones in the policy's order
        first; none of those that are `busy`. Returns False if none of them has blocks."""
        behind = [
            group
            for group in self._requests.running[index + 1 :]
            if group.seqs_in(SequenceStatus.RUNNING) and group not in busy
        ]
        if behind:
            rank = self._requests.policy.rank
            worst = max(rank(group) for group in behind)
            self._carry_out(self.cheapest([group for group in behind if rank(group) == worst]))
        return bool(behind)

    def _carry_out(self, preemption: Preemption) -> None:
        """Take the request's device blocks and queue it."""
        requests, group = self._requests, preemption.group
        planning_group, requests.planning_group = requests.planning_group, group
        group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.num_preemptions_by_swap += preemption.by_swap
        requests.note("swapped out" if preemption.by_swap else "preempted", group)
        seqs = group.seqs_in(SequenceStatus.RUNNING)
        for seq in seqs:
            self._blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        if preemption.by_swap:
            self._blocks.swap_out([seq.seq_id for seq in seqs])
            for seq in seqs:
                seq.status = SequenceStatus.SWAPPED
                requests.planned.unsettled.append((group, seq))
            requests.swapped.add(group)
        else:
            for seq in seqs:
                requests.reset(seq)
        requests.queue(group)
        requests.planning_group = planning_group

    def pause(self, group: SequenceGroup, seq: Sequence) -> None:
        """Preempt one sequence of a request in favour of its others; it starts again when there are blocks."""
        self.num_preemptions += 1
        self._requests.note("preempted", group)
        self._blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        self._requests.reset(seq)
