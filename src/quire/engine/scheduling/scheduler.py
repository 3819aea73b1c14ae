"""Who runs in the next step, how many tokens each, and in which blocks. No torch here.

There are no phases: a running sequence gets `min(num_uncomputed_tokens, what the budget leaves)` tokens, whether they
are a prompt, a chunk of one, a recomputation after a preemption or the one token of a decode (Yu et al. 2022, Orca).
What decodes is served first, and longer work gets what is left of the step (Agrawal et al. 2024, Sarathi-Serve).
"""

import time
from bisect import insort
from collections.abc import Callable, Set

from quire.common.batch import Batch, Draw, ScheduledSequence
from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.policy import make_policy
from quire.engine.scheduling.preemption import Preemption, PreemptionCost
from quire.engine.scheduling.step_plan import StepPlan
from quire.engine.scheduling.step_time import StepTimeModel
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.prefix_lookup import PrefixHit

FIRST_CHUNK = 64
"""tokens of prompts in a step while nobody knows how long a step takes"""
MIN_CHUNK = 16
"""tokens of prompts in a step, at least, however short steps are to be"""


class Scheduler:
    """Plans steps over a fixed pool of blocks.

    Owns the running requests and each sequence's status while it is unfinished; the policy owns the queue of the
    others. `running` is in the policy's order: when blocks run out one further back gives up its own and is computed
    again or swapped back later, so the first always progresses. `schedule` may be called again without a commit between
    only after `revert` (because the step failed).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockSpaceManager,
        clock: Callable[[], float] = time.monotonic,
        block_copy_s: float = 0.0,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.clock = clock
        self.step_time = StepTimeModel()
        self.policy = make_policy(config, self._num_cached_tokens)
        self.running: list[SequenceGroup] = []
        self.swapped: set[SequenceGroup] = set()
        """those of the queue that wait in the host tier"""
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_preemptions_by_swap = 0
        self.num_swapped_blocks = 0
        self.journal: list[tuple[str, SequenceGroup]] | None = None
        """what happens to requests, one after another, while somebody watches; it is theirs to empty"""
        self.in_hand: SequenceGroup | None = None
        """the request that is being planned; if `schedule` raises, whose planning has failed, None for nobody's"""
        self._cost = PreemptionCost(config, blocks, self.step_time, block_copy_s)
        self._owners: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._unsettled: list[tuple[SequenceGroup, Sequence]] = []  # whose blocks only the coming step makes good
        self._ended: list[str] = []  # request ids that ended in planning, until a step has succeeded
        self._next_seq_id = 0

    # Requests come and go

    def new_seq_id(self) -> int:
        """Given out one after another: a request's first one is its place by arrival."""
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def add(self, group: SequenceGroup) -> None:
        """Queue a new request."""
        for seq in group.seqs:
            self._owners[seq.seq_id] = (group, seq)
        self.policy.add(group)

    def owner(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """An unfinished sequence and its request; None once it is gone."""
        return self._owners.get(seq_id)

    def fork(self, group: SequenceGroup, parent: Sequence, draw: Draw) -> Sequence:
        """A new sequence with the same past as another; it shares its blocks. The caller finds it a place."""
        child = parent.fork(self.new_seq_id(), draw)
        if parent.seq_id in self.blocks:
            self.blocks.fork(parent.seq_id, child.seq_id)
        self._owners[child.seq_id] = (group, child)
        self._note("forked", group)
        return child

    def finish(self, group: SequenceGroup, seq: Sequence) -> None:
        """A running sequence has finished, or is to be no more: take its blocks back, and end a request with its last
        one."""
        if seq.seq_id in self.blocks:
            self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            self.blocks.free(seq.seq_id)
        self._forget(seq)
        if group.is_finished:
            self.running.remove(group)
            self.policy.forget(group)
            self._note("finished", group)

    def remove(self, group: SequenceGroup) -> None:
        """Forget an unfinished request and take its blocks back. It keeps its status."""
        if group in self.policy:
            self.policy.remove(group)
            self.swapped.discard(group)
        elif group in self.running:  # else it was being started, or brought back, when that failed
            self.running.remove(group)
        for seq in group.unfinished_seqs:
            if seq.seq_id in self.blocks:
                self.blocks.free(seq.seq_id)
            self._forget(seq)
        self.policy.forget(group)
        self._note("finished", group)

    def _note(self, event: str, group: SequenceGroup) -> None:
        if self.journal is not None:
            self.journal.append((event, group))

    def _forget(self, seq: Sequence) -> None:
        self.blocks.forget(seq.seq_id)
        del self._owners[seq.seq_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self.running) or len(self.policy) > 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, those in the host tier left out."""
        return len(self.policy) - len(self.swapped)

    def _num_cached_tokens(self, group: SequenceGroup) -> int:
        self.in_hand = group
        seq = group.unfinished_seqs[0]
        max_tokens = None if seq.scores is None else seq.scores.max_cached_tokens
        return self.blocks.num_cached_tokens(seq.seq_id, seq.token_ids, group.content_key, max_tokens)

    def _look_up(self, group: SequenceGroup, seq: Sequence) -> PrefixHit:
        """The longest prefix in the cache that leaves to compute what is to be scored."""
        max_tokens = None if seq.scores is None else seq.scores.max_cached_tokens
        return self.blocks.look_up(seq.seq_id, seq.token_ids, group.content_key, max_tokens)

    # The plan

    def schedule(self, only: Set[SequenceGroup] | None = None) -> Batch:
        """The plan of the next step; with `only`, for these requests, while the others wait. If it raises, `revert` and
        `remove` whoever is `in_hand`; it is all right then, if `check_integrity` says so."""
        self.in_hand = None
        self.num_steps += 1
        self.blocks.advance()
        if self.policy.counts_tokens:  # ranks change as tokens are served
            self.running.sort(key=self._place)
        plan = self._new_plan(only)
        self._schedule_running(plan)
        if not plan.preempted:
            self._start_queued(plan)
        sequences = tuple([self._scheduled(seq, num_tokens) for seq, num_tokens in plan.scheduled])
        self.in_hand = None
        transfers = self.blocks.take_transfers(self.num_steps)
        self.num_swapped_blocks += sum([len(transfer.pairs) for transfer in transfers])
        return Batch(
            self.num_steps,
            sequences,
            transfers=transfers,
            copies=self.blocks.take_copies([seq.seq_id for seq, _ in plan.scheduled], self.num_steps),
            ignored=tuple(self._ended),
        )

    def _new_plan(self, only: Set[SequenceGroup] | None) -> StepPlan:
        """The step's budgets: one token for all that decode, then prompts, as many tokens as the time allows."""
        running, budget = SequenceStatus.RUNNING, self.config.max_num_batched_tokens
        num_decodes = num_seqs = 0
        for group in self.running:
            for seq in group.seqs:
                if seq.status is running:
                    num_decodes += len(seq.token_ids) - seq.num_computed_tokens == 1
                    num_seqs += len(seq.draws) or 1
                elif seq.status is SequenceStatus.WAITING:
                    num_seqs += 1
        limit = budget
        if self.config.target_step_ms is not None:
            known = self.step_time.max_tokens(self.config.target_step_ms / 1e3)
            limit = min(budget, max(known if known is not None else FIRST_CHUNK, num_decodes + MIN_CHUNK))
        return StepPlan(budget, prefill_budget=max(1, limit - num_decodes), num_seqs=num_seqs, only=only)

    def _scheduled(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        self.in_hand = self._owners[seq.seq_id][0]
        token_ids, start = seq.token_ids, seq.num_computed_tokens
        end = start + num_tokens
        is_last = end == len(token_ids)
        return ScheduledSequence(
            seq.seq_id,
            (token_ids[-1],) if is_last and num_tokens == 1 else tuple(token_ids[start:end]),
            start,
            self.blocks.block_tables(seq.seq_id),
            seq.draws if is_last else (),
            seq.num_prompt_tokens,
            past=seq.past() if is_last and seq.needs_past else None,
            mask=seq.grammar if is_last else None,
            scored=None if seq.scores is None else seq.scores.due(start, end),
        )

    def _place(self, group: SequenceGroup) -> tuple[float, int]:
        """Where a running request stands: further back gives way first."""
        return self.policy.rank(group), group.order

    # Running requests

    def _schedule_running(self, plan: StepPlan) -> None:
        """The first first; those behind make room when blocks run out."""
        running, has_room, only, index = SequenceStatus.RUNNING, self.blocks.has_room, plan.only, 0
        while index < len(self.running) and plan.token_budget > 0:
            self.in_hand = group = self.running[index]
            for seq in group.seqs if only is None or group in only else ():
                if seq.status is running:
                    end = seq.num_computed_tokens + 1
                    if end == len(seq.token_ids) and has_room(seq.seq_id, end):  # most of them in most steps
                        if plan.token_budget > 0:
                            plan.scheduled.append((seq, 1))
                            plan.token_budget -= 1
                    else:
                        self._advance(index, group, seq, plan)
                elif seq.status is SequenceStatus.WAITING:
                    self._restart(group, seq, plan, index)
                if index >= len(self.running) or self.running[index] is not group:
                    break  # it gave way itself
            else:
                index += 1

    def _advance(self, index: int, group: SequenceGroup, seq: Sequence, plan: StepPlan) -> None:
        """Schedule a running sequence's next tokens, if the budget and the blocks allow."""
        num_tokens = plan.chunk(seq)
        if num_tokens <= 0:
            return
        end = seq.num_computed_tokens + num_tokens
        if not self.blocks.has_room(seq.seq_id, end):
            if not self._make_room(index, group, seq, end, plan):
                return
            self.blocks.append(seq.seq_id, seq.num_computed_tokens, end)
        plan.add(seq, num_tokens)

    def _make_room(self, index: int, group: SequenceGroup, seq: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Preempt requests behind this one until the sequence can grow; False if it had to give way itself."""
        while not self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, num_tokens):
            plan.preempted = True
            own = group.seqs_in(SequenceStatus.RUNNING)
            if self._preempt_behind(index):
                continue
            if own[-1] is not seq:
                self._park(own[-1])
            else:
                if own[0] is not seq:
                    self._park(seq)
                elif index > 0:
                    self._preempt(self._cost.estimate(group))
                else:
                    self._give_up(group, seq)
                return False
        return True

    def _preempt_behind(self, index: int) -> bool:
        """Preempt one of the requests behind this one, if any has blocks."""
        behind = [group for group in self.running[index + 1 :] if group.seqs_in(SequenceStatus.RUNNING)]
        if behind:
            worst = max(self.policy.rank(other) for other in behind)
            self._preempt(self._cost.cheapest([other for other in behind if self.policy.rank(other) == worst]))
        return bool(behind)

    def preempt(self, group: SequenceGroup) -> None:
        """Take a running request's blocks away before the next step; it goes on later where it was."""
        self._preempt(self._cost.estimate(group))

    def _preempt(self, preemption: Preemption) -> None:
        """Take the device blocks away: to the host tier, or for good, and the tokens are computed again later."""
        in_hand, self.in_hand = self.in_hand, preemption.group
        group = preemption.group
        group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.num_preemptions_by_swap += preemption.by_swap
        self._note("swapped out" if preemption.by_swap else "preempted", group)
        seqs = group.seqs_in(SequenceStatus.RUNNING)
        for seq in seqs:
            self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        if preemption.by_swap:
            self.blocks.swap_out([seq.seq_id for seq in seqs])
            for seq in seqs:
                seq.status = SequenceStatus.SWAPPED
                self._unsettled.append((group, seq))
            self.swapped.add(group)
        else:
            for seq in seqs:
                self._stop(seq)
        self.running.remove(group)
        self.policy.add(group)
        self.in_hand = in_hand

    def _park(self, seq: Sequence) -> None:
        """One sequence of a request gives way to the others; it starts again when there is room."""
        self.num_preemptions += 1
        self._note("preempted", self._owners[seq.seq_id][0])
        self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        self._stop(seq)

    def _stop(self, seq: Sequence) -> None:
        """Back to the beginning."""
        self.blocks.free(seq.seq_id)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING

    def _give_up(self, group: SequenceGroup, seq: Sequence) -> None:
        """Nobody is left to make room, and the sequence cannot grow."""
        pool, pins = self.blocks.pool, self.blocks.pins
        group.error = (
            f"stopped after {seq.num_output_tokens} tokens: {seq.num_tokens} tokens and one more do not fit into the "
            f"{pool.num_blocks} blocks of the KV cache, of which {pins.num_blocks} are pinned"
        )
        for ended in [seq] if group.search is None else group.unfinished_seqs:  # a search ends as a whole
            ended.status = SequenceStatus.FINISHED_LENGTH_CAPPED
            self.finish(group, ended)
        if group.is_finished:
            self._report(group)

    def _restart(self, group: SequenceGroup, seq: Sequence, plan: StepPlan, index: int) -> None:
        """A sequence that gave way to the others of its request, number `index` of those that run."""
        if plan.preempted or plan.chunk(seq) <= 0 or seq.held is not None:
            return
        hit = self._look_up(group, seq)
        status = self.blocks.can_allocate(hit)
        beams = [] if group.search is None else group.seqs_in(SequenceStatus.RUNNING)
        idle = [beam for beam in beams if not beam.num_uncomputed_tokens]
        if status is AllocStatus.OK and not hit.is_awaited:
            self._begin(group, seq, hit, plan)
        elif status is AllocStatus.NEVER and len(idle) == len(beams):  # pinned meanwhile
            self._give_up(group, seq)
        elif status is AllocStatus.LATER and group.search is not None:
            plan.preempted = True  # no room comes of waiting: the other beams wait for this one
            if not self._preempt_behind(index) and idle:
                self._park(idle[-1])

    # The queue

    def _start_queued(self, plan: StepPlan) -> None:
        """Start others, in the policy's order, while the step has tokens, sequences and blocks left for them."""
        if plan.is_full(self.config.max_num_seqs, 1):  # before the policy looks anybody up
            return
        self.in_hand = None
        for group in self.policy.candidates(self.clock()):
            if plan.only is not None and group not in plan.only:
                continue
            self.in_hand = group
            if plan.is_full(self.config.max_num_seqs, group.num_wanted_seqs):
                break
            if not (self._resume(group, plan) if group in self.swapped else self._start(group, plan)):
                break
            self.in_hand = None

    def _start(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Start a waiting request, or leave it for a step or two while others compute its prefix.

        False if it has to wait for blocks: then nobody overtakes it.
        """
        seq, *others = [seq for seq in group.seqs_in(SequenceStatus.WAITING) if seq.held is None]
        hit = self._look_up(group, seq)
        if hit.is_awaited:
            return True
        status = self.blocks.can_allocate(hit)
        if status is AllocStatus.LATER:
            return False
        if status is AllocStatus.NEVER:
            self._ignore(group)
            return True
        self.policy.remove(group)
        self._begin(group, seq, hit, plan)
        for other in others:
            self._restart(group, other, plan, len(self.running))
        plan.num_seqs += group.num_wanted_seqs
        insort(self.running, group, key=self._place)
        return True

    def _ignore(self, group: SequenceGroup) -> None:
        """The request can never run."""
        blocks, num_tokens = self.blocks, max(seq.num_tokens for seq in group.unfinished_seqs)
        group.error = f"{num_tokens} tokens never fit into the KV cache of {blocks.config.max_tokens} tokens"
        if blocks.pins.num_blocks:
            group.error += f" while {blocks.pins.num_blocks} of its {blocks.pool.num_blocks} blocks are pinned"
        self.remove(group)
        for seq in group.unfinished_seqs:
            seq.status = SequenceStatus.FINISHED_IGNORED
        self._report(group)

    def _report(self, group: SequenceGroup) -> None:
        """It ended in planning: the batch says so, or the next one if this step fails."""
        group.metrics.finished_time = self.clock()
        self._ended.append(group.request_id)

    def _begin(self, group: SequenceGroup, seq: Sequence, hit: PrefixHit, plan: StepPlan) -> None:
        """Give a sequence its prefix and its first tokens."""
        seq.num_computed_tokens = self.blocks.allocate(hit)
        if hit.needs_step:
            self._unsettled.append((group, seq))
        num_tokens = plan.chunk(seq)
        self.blocks.append(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
        self._note("started" if group.metrics.first_scheduled_time is None else "restarted", group)
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = self.clock()
            group.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        plan.add(seq, num_tokens)

    def _resume(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Bring a request back from the host tier and schedule its tokens. False if it has to wait for blocks."""
        seqs = group.seqs_in(SequenceStatus.SWAPPED)
        seq_ids = [seq.seq_id for seq in seqs]
        if not self.blocks.can_swap_in(seq_ids, max(seq.num_tokens for seq in seqs)):
            if not self.running:  # pinned meanwhile: together they have no room any more, but each may have
                for seq in seqs:
                    self._stop(seq)
                self.swapped.remove(group)
            return False
        self.policy.remove(group)
        self.swapped.remove(group)
        self.blocks.swap_in(seq_ids)
        self._note("swapped in", group)
        for seq in seqs:
            seq.status = SequenceStatus.RUNNING
            self._unsettled.append((group, seq))
            num_tokens = plan.chunk(seq)
            end = seq.num_computed_tokens + num_tokens
            if num_tokens > 0 and self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, end):
                self.blocks.append(seq.seq_id, seq.num_computed_tokens, end)
                plan.add(seq, num_tokens)
        plan.num_seqs += group.num_wanted_seqs
        insort(self.running, group, key=self._place)
        return True

    def settle(self) -> None:
        """The batch planned last has been executed."""
        self._unsettled, self._ended = [], []
        self.blocks.settle(self.num_steps)

    def revert(self) -> None:
        """The batch planned last failed: the sequences that rely on what it was to swap or to compute for another start
        again, since that may be there or not; the others are as they were before."""
        for group, seq in self._unsettled:
            if self.owner(seq.seq_id) is None:  # aborted while the step ran
                continue
            if seq.status is not SequenceStatus.WAITING:
                self._stop(seq)
            if group in self.swapped:
                self.swapped.remove(group)
            elif group in self.running and not group.seqs_in(SequenceStatus.RUNNING):
                self.running.remove(group)
                self.policy.add(group)
        self._unsettled = []
        self.blocks.revert(self.num_steps)

    def check_integrity(self) -> None:
        """Whoever has blocks is known, whoever is known is unfinished, their requests run or are queued, and the blocks
        are in order; or AssertionError."""
        running = set(self.running)
        assert len(running) == len(self.running), "a request runs twice"
        for seq_id, (group, seq) in self._owners.items():
            assert any(other is seq for other in group.unfinished_seqs), f"sequence {seq_id} is kept, but finished"
            assert (group in running) != (group in self.policy), f"request {group.request_id!r} is nowhere, or twice"
        assert all(seq_id in self._owners for seq_id, _, _ in self.blocks.holdings()), "blocks are held for nobody"
        self.blocks.check_integrity()
