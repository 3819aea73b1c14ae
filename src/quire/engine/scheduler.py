"""Who runs in the next step, how many tokens each, and in which blocks. No torch here.

There are no phases: a running sequence gets `min(num_uncomputed_tokens, what the budget leaves)` tokens, whether they
are a prompt, a chunk of one, a recomputation after a preemption or the one token of a decode (Yu et al. 2022, Orca;
Agrawal et al. 2024, Sarathi-Serve).
"""

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field

from quire.batch import Batch, BlockPairs, ScheduledSequence
from quire.config.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager


@dataclass(slots=True)
class _Plan:
    """A Batch in the making."""

    token_budget: int
    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    swap_out: BlockPairs = ()
    swap_in: BlockPairs = ()
    preempted: bool = False

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.scheduled.append((seq, num_tokens))
        self.token_budget -= num_tokens


class Scheduler:
    """First come, first served over a fixed pool of blocks.

    Owns the queues, and each sequence's status while it is in one of them. `running` is in order of arrival: when
    blocks run out the last to arrive gives up its own and is computed again later, so the oldest request always
    progresses. `schedule` called again without a commit between (because the step failed) plans the same tokens again.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: BlockSpaceManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.clock = clock
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.swapped: deque[SequenceGroup] = deque()
        self._moved: list[SequenceGroup] = []  # swapped out or in by the batch planned last
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swapped_blocks = 0

    def add(self, group: SequenceGroup) -> None:
        """Queue a new request."""
        self.waiting.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """Forget a request, finished or aborted, and take its blocks back."""
        if group in self.running:  # the shortest queue by far, and where those that finish are
            self.running.remove(group)
            self._free(group)
        elif group in self.swapped:
            self.swapped.remove(group)
            self._free(group)
        else:
            self.waiting.remove(group)
        for seq in group.seqs:
            self.blocks.forget(seq.seq_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self.waiting or self.running or self.swapped)

    def schedule(self) -> Batch:
        """The plan of the next step."""
        self.num_steps += 1
        self._moved = []
        self.blocks.advance()
        plan = _Plan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted:
            self._resume_swapped(plan)
        if not plan.preempted and not self.swapped:
            self._admit_waiting(plan)
        self.num_swapped_blocks += len(plan.swap_out) + len(plan.swap_in)
        return Batch(
            self.num_steps,
            sequences=tuple(self._scheduled(seq, num_tokens) for seq, num_tokens in plan.scheduled),
            swap_out=plan.swap_out,
            swap_in=plan.swap_in,
            copies=tuple(copy for seq, _ in plan.scheduled for copy in self.blocks.copies(seq.seq_id)),
            ignored=tuple(plan.ignored),
        )

    def _schedule_running(self, plan: _Plan) -> None:
        """Oldest first; the newest make room when blocks run out."""
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            group = self.running[index]
            for seq in group.unfinished_seqs:
                num_tokens = min(seq.num_uncomputed_tokens, plan.token_budget)
                if num_tokens == 0 or not self._make_room(group, seq, seq.num_computed_tokens + num_tokens, plan):
                    break
                self.blocks.append(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
                plan.add(seq, num_tokens)
            index += 1

    def _make_room(self, group: SequenceGroup, seq: Sequence, num_tokens: int, plan: _Plan) -> bool:
        """Preempt the newest until the sequence can grow; False if it was the newest itself."""
        while not self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, num_tokens):
            victim = self.running.pop()
            self._preempt(victim, plan)
            plan.preempted = True
            if victim is group:
                return False
        return True

    def _preempt(self, group: SequenceGroup, plan: _Plan) -> None:
        """Take the device blocks away: to the host tier, or for good, and the tokens are computed again later."""
        group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        seq_ids = [seq.seq_id for seq in group.seqs]
        for seq in group.seqs:
            self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        if self.config.preemption_mode != "recompute" and self.blocks.can_swap_out(seq_ids):
            plan.swap_out += self.blocks.swap_out(seq_ids)
            group.set_status(SequenceStatus.SWAPPED)
            _insert(self.swapped, group)
            self._moved.append(group)
        else:
            self._requeue(group)

    def _requeue(self, group: SequenceGroup) -> None:
        """Before any newer request, but from the beginning."""
        self._free(group)
        group.set_status(SequenceStatus.WAITING)
        _insert(self.waiting, group)

    def _resume_swapped(self, plan: _Plan) -> None:
        """Bring swapped-out requests back, oldest first, and schedule their tokens."""
        while self.swapped and plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            group = self.swapped[0]
            seq_ids = [seq.seq_id for seq in group.seqs]
            if not self.blocks.can_swap_in(seq_ids, max(seq.num_tokens for seq in group.seqs)):
                break
            self.swapped.popleft()
            plan.swap_in += self.blocks.swap_in(seq_ids)
            group.set_status(SequenceStatus.RUNNING)
            _insert(self.running, group)
            self._moved.append(group)
            for seq in group.unfinished_seqs:
                num_tokens = min(seq.num_uncomputed_tokens, plan.token_budget)
                self.blocks.append(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
                plan.add(seq, num_tokens)

    def revert(self) -> None:
        """The batch planned last failed: whether its swaps were done nobody knows, so those requests start again."""
        for group in self._moved:
            (self.swapped if group in self.swapped else self.running).remove(group)
            self._requeue(group)
        self._moved = []

    def _free(self, group: SequenceGroup) -> None:
        for seq in group.seqs:
            self.blocks.free(seq.seq_id)
            seq.num_computed_tokens = 0

    def _admit_waiting(self, plan: _Plan) -> None:
        """Start waiting requests while the step has tokens, sequences and blocks left for them."""
        while self.waiting and plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            group = self.waiting[0]
            (seq,) = group.seqs
            status = self.blocks.can_allocate(seq.seq_id, seq.token_ids)
            if status is AllocStatus.LATER:
                break
            self.waiting.popleft()
            if status is AllocStatus.NEVER:
                group.set_status(SequenceStatus.FINISHED_IGNORED)
                group.error = (
                    f"{seq.num_tokens} tokens never fit into the KV cache of {self.blocks.config.max_tokens} tokens"
                )
                plan.ignored.append(group.request_id)
            else:
                self._start(group, seq, plan)

    def _start(self, group: SequenceGroup, seq: Sequence, plan: _Plan) -> None:
        seq.num_computed_tokens = self.blocks.allocate(seq.seq_id, seq.token_ids)
        num_tokens = min(seq.num_uncomputed_tokens, plan.token_budget)
        self.blocks.append(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = self.clock()
            group.num_cached_tokens = seq.num_computed_tokens
        group.set_status(SequenceStatus.RUNNING)
        _insert(self.running, group)
        plan.add(seq, num_tokens)

    def _scheduled(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        return ScheduledSequence(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.token_ids[start:end]),
            start=start,
            block_tables=self.blocks.block_tables(seq.seq_id),
            draw=seq.draw if end == seq.num_tokens else None,
        )


def _insert(queue: MutableSequence[SequenceGroup], group: SequenceGroup) -> None:
    """Put a request into its place by arrival."""
    index = bisect(queue, group.order, key=lambda other: other.order)
    queue.insert(index, group)
