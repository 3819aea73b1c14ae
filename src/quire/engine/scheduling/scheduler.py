"""Who runs in the next step, how many tokens each, and in which blocks. No torch here.

There are no phases: a running sequence gets `min(num_uncomputed_tokens, what the budget leaves)` tokens, whether they
are a prompt, a chunk of one, a recomputation after a preemption or the newest token of a decode (Yu et al. 2022, Orca).
Decodes are served first, and longer work gets what is left of the step (Agrawal et al. 2024, Sarathi-Serve). Drafts to
be verified come last of all, from what nothing else needs.
"""

import time
from bisect import insort
from collections.abc import Callable, Set

from quire.common.batch import Batch, Draw
from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.in_flight import InFlight
from quire.engine.scheduling.policy import make_policy
from quire.engine.scheduling.preemption import Preemption, PreemptionCost
from quire.engine.scheduling.scheduled import scheduled_sequence
from quire.engine.scheduling.step_plan import StepPlan
from quire.engine.scheduling.step_time import StepTimeModel
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.prefix_lookup import PrefixHit

FIRST_CHUNK = 64
"""Tokens of prompts in a step while the time of a step is still unknown."""
MIN_CHUNK = 16
"""Tokens of prompts in a step at least, however short the target time of a step is."""


class Scheduler:
    """Plans steps over a fixed pool of blocks.

    Owns the running requests and the status of each unfinished sequence; the policy owns the queue of all other
    requests. `running` is in the policy's order: when blocks run out, a request further back is preempted, so the first
    always progresses. Several planned batches may be in flight: a request that is part of one is left alone until
    `settle` or `revert` says what became of it.
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
        """The queued requests whose blocks are in the host tier."""
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_preemptions_by_swap = 0
        self.num_swapped_blocks = 0
        self.journal: list[tuple[str, SequenceGroup]] | None = None
        """What happens to requests, in order, while a live view is open; the view empties it. None without a view."""
        self.planning_group: SequenceGroup | None = None
        """The request that is being planned. If `schedule` raises, the one whose planning failed, or None if it was no
        request's."""
        self._cost = PreemptionCost(config, blocks, self.step_time, block_copy_s)
        self._owners: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._in_flight: dict[int, InFlight] = {}  # by step
        self._current = InFlight()  # of the step that is being planned
        self._next_seq_id = 0

    # Requests come and go

    def new_seq_id(self) -> int:
        """Ids ascend: the first sequence's id is the request's place by arrival."""
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def add(self, group: SequenceGroup) -> None:
        """Queue a new request."""
        for seq in group.seqs:
            self._owners[seq.seq_id] = (group, seq)
        self.policy.add(group)

    def owner(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """An unfinished sequence and its request; None once it has ended."""
        return self._owners.get(seq_id)

    def fork(self, group: SequenceGroup, parent: Sequence, draw: Draw) -> Sequence:
        """A new sequence with the same history as another, sharing its blocks. The caller adds it to the request."""
        child = parent.fork(self.new_seq_id(), draw)
        if parent.seq_id in self.blocks:
            self.blocks.fork(parent.seq_id, child.seq_id)
        self._owners[child.seq_id] = (group, child)
        self._note("forked", group)
        return child

    def finish(self, group: SequenceGroup, seq: Sequence) -> None:
        """Free the blocks of a sequence that has finished or is dropped; end the request with its last sequence."""
        if seq.seq_id in self.blocks:
            self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            self.blocks.free(seq.seq_id)
        self._forget(seq)
        if group.is_finished:
            self.running.remove(group)
            self.policy.forget(group)
            self._note("finished", group)

    def remove(self, group: SequenceGroup) -> None:
        """Forget an unfinished request and free its blocks. Its status stays."""
        if group in self.policy:
            self.policy.remove(group)
            self.swapped.discard(group)
        elif group in self.running:  # otherwise starting or resuming it failed
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
        """Requests in the queue, without those in the host tier."""
        return len(self.policy) - len(self.swapped)

    def _num_cached_tokens(self, group: SequenceGroup) -> int:
        self.planning_group = group
        seq = group.unfinished_seqs[0]
        max_tokens = None if seq.scores is None else seq.scores.max_cached_tokens
        return self.blocks.num_cached_tokens(seq.seq_id, seq.token_ids, group.content_key, max_tokens)

    def _look_up(self, group: SequenceGroup, seq: Sequence) -> PrefixHit:
        """The longest cached prefix that leaves the tokens to compute whose successors must still be scored."""
        max_tokens = None if seq.scores is None else seq.scores.max_cached_tokens
        return self.blocks.look_up(seq.seq_id, seq.token_ids, group.content_key, max_tokens)

    # The plan

    def schedule(self, only: Set[SequenceGroup] | None = None) -> Batch:
        """The plan of the next step; with `only`, the other requests wait. If it raises, call `revert()` and `remove`
        the `planning_group`; `check_integrity` then says whether the state is sound."""
        self.planning_group = None
        self.num_steps += 1
        self.blocks.advance()
        if self.policy.counts_tokens:  # ranks change as tokens are served
            self.running.sort(key=self._place)
        plan = self._new_plan(only)
        self._schedule_running(plan)
        if not plan.preempted:
            self._start_queued(plan)
        self._add_drafts(plan)
        sequences = []
        for seq, num_tokens in plan.scheduled:
            self.planning_group = self._owners[seq.seq_id][0]
            drafts = plan.drafts.get(seq.seq_id, ()) if plan.drafts else ()
            sequences.append(scheduled_sequence(seq, num_tokens, drafts, self.blocks.block_tables(seq.seq_id)))
        self.planning_group = None
        transfers = self.blocks.take_transfers(self.num_steps)
        self.num_swapped_blocks += sum([len(transfer.pairs) for transfer in transfers])
        batch = Batch(
            self.num_steps,
            tuple(sequences),
            transfers=transfers,
            copies=self.blocks.take_copies([seq.seq_id for seq, _ in plan.scheduled], self.num_steps),
            ignored=tuple(self._current.ended),
        )
        self._current.scheduled = plan.scheduled
        self._in_flight[batch.step], self._current = self._current, InFlight()
        return batch

    def _new_plan(self, only: Set[SequenceGroup] | None) -> StepPlan:
        """The step's budgets: one token for each sequence that decodes, then prompts, as many as the time allows."""
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
        return StepPlan(budget, max(1, limit - num_decodes), num_seqs, only=only, busy=self.busy_groups())

    def busy_groups(self) -> Set[SequenceGroup]:
        """The unfinished requests of all batches in flight."""
        seqs = [seq for step in self._in_flight.values() for seq, _ in step.scheduled]
        return {owner[0] for seq in seqs if (owner := self.owner(seq.seq_id)) is not None}

    def _add_drafts(self, plan: StepPlan) -> None:
        """Have drafts verified with the tokens, rows and blocks that are left. Nothing is preempted for them."""
        num_rows = plan.num_seqs
        for seq, num_tokens in plan.scheduled:
            if not seq.drafts:
                continue
            end = seq.num_computed_tokens + num_tokens
            count = min(len(seq.drafts), plan.token_budget, self.config.max_num_seqs - num_rows)
            if end < len(seq.token_ids) or len(seq.draws) != 1 or count <= 0:
                continue
            self.planning_group = self._owners[seq.seq_id][0]
            if self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, end + count):
                self.blocks.append(seq.seq_id, seq.num_computed_tokens, end + count)
                plan.drafts[seq.seq_id] = seq.drafts[:count]
                plan.token_budget -= count
                num_rows += count

    def _place(self, group: SequenceGroup) -> tuple[float, int]:
        """A running request's place in the order: those further back are preempted first."""
        return self.policy.rank(group), group.order

    # Running requests

    def _schedule_running(self, plan: StepPlan) -> None:
        """Serve the running requests in order; those further back are preempted when blocks run out."""
        running, has_room, busy, index = SequenceStatus.RUNNING, self.blocks.has_room, plan.busy, 0
        only = plan.only
        while index < len(self.running) and plan.token_budget > 0:
            self.planning_group = group = self.running[index]
            for seq in group.seqs if (only is None or group in only) and group not in busy else ():
                if seq.status is running:
                    end = seq.num_computed_tokens + 1
                    if end == len(seq.token_ids) and has_room(seq.seq_id, end):  # most sequences in most steps
                        if plan.token_budget > 0:
                            plan.scheduled.append((seq, 1))
                            plan.token_budget -= 1
                    else:
                        self._advance(index, group, seq, plan)
                elif seq.status is SequenceStatus.WAITING:
                    self._restart(group, seq, plan, index)
                if index >= len(self.running) or self.running[index] is not group:
                    break  # the request itself was preempted
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
        """Preempt requests behind this one until the sequence can grow; False if it was preempted itself, or has to
        wait for a batch in flight."""
        while not self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, num_tokens):
            plan.preempted = True
            own = group.seqs_in(SequenceStatus.RUNNING)
            if self._preempt_behind(index, plan):
                continue
            if plan.busy:
                return False
            if own[-1] is not seq:
                self._park(own[-1])
            else:
                if own[0] is not seq:
                    self._park(seq)
                elif index > 0:
                    self._preempt(self._cost.estimate(group))
                else:
                    self._end_without_blocks(group, seq)
                return False
        return True

    def _preempt_behind(self, index: int, plan: StepPlan) -> bool:
        """Preempt one of the requests behind this one, if any has blocks."""
        behind = [
            group
            for group in self.running[index + 1 :]
            if group.seqs_in(SequenceStatus.RUNNING) and group not in plan.busy
        ]
        if behind:
            worst = max(self.policy.rank(other) for other in behind)
            self._preempt(self._cost.cheapest([other for other in behind if self.policy.rank(other) == worst]))
        return bool(behind)

    def preempt(self, group: SequenceGroup) -> None:
        """Preempt a running request before the next step; it continues later where it was. It must not be busy."""
        assert group not in self.busy_groups(), f"request {group.request_id!r} is in a batch that is in flight"
        self._preempt(self._cost.estimate(group))

    def _preempt(self, preemption: Preemption) -> None:
        """Take the device blocks away: swapped to the host tier, or freed and their tokens computed again later."""
        planning_group, self.planning_group = self.planning_group, preemption.group
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
                self._current.unsettled.append((group, seq))
            self.swapped.add(group)
        else:
            for seq in seqs:
                self._stop(seq)
        self.running.remove(group)
        self.policy.add(group)
        self.planning_group = planning_group

    def _park(self, seq: Sequence) -> None:
        """Preempt one sequence of a request in favour of its others; it starts again when there are blocks."""
        self.num_preemptions += 1
        self._note("preempted", self._owners[seq.seq_id][0])
        self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        self._stop(seq)

    def _stop(self, seq: Sequence) -> None:
        """Free a sequence's blocks, so that all its tokens have to be computed again."""
        self.blocks.free(seq.seq_id)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING

    def _end_without_blocks(self, group: SequenceGroup, seq: Sequence) -> None:
        """The sequence cannot grow, and there is no other request to preempt."""
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
        """Restart a sequence that was preempted in favour of its request's others; `index` is the request's place."""
        if plan.preempted or plan.chunk(seq) <= 0 or seq.beam_candidates is not None:
            return
        hit = self._look_up(group, seq)
        status = self.blocks.can_allocate(hit)
        beams = [] if group.search is None else group.seqs_in(SequenceStatus.RUNNING)
        idle = [beam for beam in beams if not beam.num_uncomputed_tokens]
        if status is AllocStatus.OK and not hit.is_awaited:
            self._begin(group, seq, hit, plan)
        elif status is AllocStatus.NEVER and len(idle) == len(beams):  # blocks have been pinned meanwhile
            self._end_without_blocks(group, seq)
        elif status is AllocStatus.LATER and group.search is not None:
            plan.preempted = True  # waiting frees nothing: the other beams wait for this one
            if not self._preempt_behind(index, plan) and idle:
                self._park(idle[-1])

    # The queue

    def _start_queued(self, plan: StepPlan) -> None:
        """Start queued requests in the policy's order while tokens, sequences and blocks are left."""
        if plan.is_full(self.config.max_num_seqs, 1):  # before the policy looks up prefixes
            return
        self.planning_group = None
        for group in self.policy.candidates(self.clock()):
            if plan.only is not None and group not in plan.only:
                continue
            self.planning_group = group
            if plan.is_full(self.config.max_num_seqs, group.num_wanted_seqs):
                break
            if not (self._resume(group, plan) if group in self.swapped else self._start(group, plan)):
                break
            self.planning_group = None

    def _start(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Start a waiting request, or leave it for a step or two while another computes its prefix.

        False if it has to wait for blocks: then no other request may overtake it.
        """
        seq, *others = [seq for seq in group.seqs_in(SequenceStatus.WAITING) if seq.beam_candidates is None]
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
        """Report in the batch, or in the next one if this step fails, that a request ended in planning."""
        group.metrics.finished_time = self.clock()
        self._current.ended.append(group.request_id)

    def _begin(self, group: SequenceGroup, seq: Sequence, hit: PrefixHit, plan: StepPlan) -> None:
        """Give a sequence its prefix and its first tokens."""
        seq.num_computed_tokens = self.blocks.allocate(hit)
        if hit.needs_step:
            self._current.unsettled.append((group, seq))
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
            if not self.running:  # blocks have been pinned meanwhile: each sequence alone may still fit
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
            self._current.unsettled.append((group, seq))
            num_tokens = plan.chunk(seq)
            end = seq.num_computed_tokens + num_tokens
            if num_tokens > 0 and self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, end):
                self.blocks.append(seq.seq_id, seq.num_computed_tokens, end)
                plan.add(seq, num_tokens)
        plan.num_seqs += group.num_wanted_seqs
        insort(self.running, group, key=self._place)
        return True

    def settle(self, step: int) -> None:
        """The batch of this step has been executed."""
        self._in_flight.pop(step)
        self.blocks.settle(step)

    def revert(self, step: int | None = None) -> None:
        """The batch of this step failed, or the step being planned if None. Sequences that rely on blocks it was to
        swap, or on another sequence's, start again, since those may be there or not; all others are as before."""
        failed = self._current if step is None else self._in_flight.pop(step)
        for group, seq in failed.unsettled:
            if self.owner(seq.seq_id) is None:  # aborted while the step ran
                continue
            if seq.status is not SequenceStatus.WAITING:
                self._stop(seq)
            if group in self.swapped:
                self.swapped.remove(group)
            elif group in self.running and not group.seqs_in(SequenceStatus.RUNNING):
                self.running.remove(group)
                self.policy.add(group)
        self._current = InFlight(ended=failed.ended + ([] if step is None else self._current.ended))
        self.blocks.revert(self.num_steps if step is None else step)

    def check_integrity(self) -> None:
        """AssertionError unless every sequence with blocks is known, every known sequence is unfinished and its request
        runs or is queued, and the blocks are in order."""
        running = set(self.running)
        assert len(running) == len(self.running), "a request is in the list of running requests twice"
        for seq_id, (group, seq) in self._owners.items():
            assert any(other is seq for other in group.unfinished_seqs), f"sequence {seq_id} has finished"
            assert (group in running) != (group in self.policy), (
                f"request {group.request_id!r} is in no queue, or in two"
            )
        assert all(seq_id in self._owners for seq_id, _, _ in self.blocks.holdings()), (
            "blocks belong to an unknown sequence"
        )
        self.blocks.check_integrity()
