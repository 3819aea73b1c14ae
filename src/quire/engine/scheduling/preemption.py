"""What taking a request's blocks away costs, and by which way it costs less."""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.scheduling.step_time import StepTimeModel
from quire.kv.block_space_manager import BlockSpaceManager

MAX_CANDIDATES = 8
"""of the requests that may give way, so many, the newest, are compared"""


@dataclass(frozen=True, slots=True)
class Preemption:
    """One request's blocks taken away, by the cheaper way that is allowed and possible."""

    group: SequenceGroup
    by_swap: bool
    cost_s: float
    """estimated, until the request is where it was before"""
    num_freed_blocks: int


class PreemptionCost:
    """Compares computing tokens again, at the measured pace, with copying blocks to the host tier and back."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockSpaceManager, step_time: StepTimeModel, block_copy_s: float
    ) -> None:
        """`block_copy_s`: of one block, one way."""
        self._mode = config.preemption_mode
        self._blocks = blocks
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
