"""Which sequences run in the next step, how many tokens each, and in which blocks. This module does not import torch.

There are no phases: a running sequence gets `min(num_uncomputed_tokens, what the budget leaves)` tokens, whether they
are a prompt, a chunk of one, a recomputation after a preemption or the newest token of a decode (Yu et al. 2022, Orca).
Decodes are served first, and longer work gets what is left of the step (Agrawal et al. 2024, Sarathi-Serve). Drafts to
be verified come last of all, from what nothing else needs.
"""

import time
from collections.abc import Callable, Iterable, Set

from quire.common.batch import Batch
from quire.common.errors import CheckpointError
from quire.common.log import logger
from quire.config.scheduler import SchedulerConfig
from quire.engine.drafting.drafting import Drafting
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.draft_slots import look_ahead, make_slots, takes_drafts
from quire.engine.scheduling.loaded_adapters import LoadedAdapters
from quire.engine.scheduling.policy import make_policy
from quire.engine.scheduling.preemption import Preemptor
from quire.engine.scheduling.scheduled import scheduled_sequence
from quire.engine.scheduling.step_plan import StepPlan
from quire.engine.scheduling.step_time import StepTimeModel
from quire.engine.scheduling.unfinished import UnfinishedRequests
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager
from quire.kv.prefix_cache.lookup import PrefixHit

FIRST_CHUNK = 64
"""Tokens of prompts in a step while the time of a step is still unknown."""
MIN_CHUNK = 16
"""Tokens of prompts in a step at least, however short the target time of a step is."""
LOOK_AHEAD = 256
"""Queued requests that may start in a step, so that its cost does not grow with the queue. Those whose adapters find no
slot are passed over at little cost, and do not count."""


class Scheduler:
    """Plans steps over a fixed pool of blocks.

    `requests` knows where each request is, the scheduler decides where it goes. The running requests are served in the
    policy's order, and when blocks run out, one further back is preempted: so the first always progresses. Several
    planned batches may be in flight: a request that is part of one is left alone until `requests.settle` or
    `requests.revert` says what became of it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockSpaceManager,
        clock: Callable[[], float] = time.monotonic,
        block_copy_s: float = 0.0,
        adapters: LoadedAdapters | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`drafting` proposes the drafts that steps verify; None for no drafts."""
        self.config = config
        self.blocks = blocks
        self.adapters = adapters or LoadedAdapters()
        self.clock = clock
        self.step_time = StepTimeModel()
        self.drafting = drafting
        self.requests = UnfinishedRequests(make_policy(config, self._num_cached_tokens), blocks)
        self.preemptor = Preemptor(config, self.requests, self.step_time, block_copy_s)
        self.num_steps = 0
        self.num_swapped_blocks = 0

    def _num_cached_tokens(self, group: SequenceGroup) -> int:
        self.requests.planning_group = group
        seq = group.unfinished_seqs[0]
        return self.blocks.num_cached_tokens(seq.seq_id, seq.token_ids, group.content_key, seq.max_cached_tokens)

    def _look_up(self, group: SequenceGroup, seq: Sequence) -> PrefixHit:
        """The longest cached prefix that leaves the tokens to compute whose successors must still be scored."""
        return self.blocks.look_up(seq.seq_id, seq.token_ids, group.content_key, seq.max_cached_tokens)

    def observe(self, batch: Batch, seconds: float, drafting_s: float = 0.0, num_passes: int = 0) -> None:
        """Learn how long a batch took, and how long of that the draft model for its passes."""
        self.step_time.observe(batch.num_tokens, seconds)
        if self.drafting is not None:
            self.drafting.observe_step(batch, seconds - drafting_s, drafting_s, num_passes)

    # The plan

    def schedule(self, only: Set[SequenceGroup] | None = None) -> Batch:
        """The plan of the next step; with `only`, the other requests wait. If it raises, call `requests.revert()`, and
        remove the request's `planning_group`; `check_integrity` then says whether the state is sound."""
        self._begin_step()
        plan = self._new_plan(only, *self._count_running())
        self._schedule_running(plan)
        if not plan.preempted:
            self._start_queued(plan)
        self._add_drafts(plan)
        return self._batch(plan)

    def schedule_beside(self, num_decodes: int, growing: Iterable[tuple[int, int]]) -> Batch:
        """As `schedule`, for a simulation: the running requests, `num_decodes` single sequences, all compute one token,
        and the batch has only those that start beside them. `growing`: ids of the sequences that need another block
        for it, which there is, and their lengths."""
        self._begin_step()
        for seq_id, num_tokens in growing:
            self.blocks.append(seq_id, num_tokens - 1, num_tokens)
        plan = self._new_plan(None, num_decodes, num_decodes)
        plan.token_budget -= num_decodes
        self._start_queued(plan)
        return self._batch(plan)

    def _begin_step(self) -> None:
        """Begin another step."""
        requests = self.requests
        requests.planning_group = None
        self.num_steps += 1
        self.blocks.advance()
        if requests.policy.counts_tokens:  # ranks change as tokens are served
            requests.running.sort(key=requests.place)

    def _batch(self, plan: StepPlan) -> Batch:
        """The batch of what is planned, which is in flight from now on."""
        requests = self.requests
        ahead = {} if self.drafting is None else look_ahead(plan, self.drafting, requests)
        sequences, drafts, block_tables = [], plan.drafts, self.blocks.block_tables
        for group, seq, num_tokens in plan.scheduled:
            requests.planning_group = group
            seq_drafts = drafts.get(seq.seq_id, ()) if drafts else ()
            adapter = -1 if group.adapter is None else self.adapters.slot(group)
            tables, seq_ahead = block_tables(seq.seq_id), ahead.get(seq.seq_id) if ahead else None
            sequences.append(scheduled_sequence(seq, num_tokens, seq_drafts, tables, adapter, seq_ahead))
        requests.planning_group = None
        transfers = self.blocks.take_transfers(self.num_steps)
        for transfer in transfers:
            self.num_swapped_blocks += len(transfer.pairs)
        batch = Batch(
            self.num_steps,
            tuple(sequences),
            transfers=transfers,
            copies=self.blocks.take_copies([seq.seq_id for _, seq, _ in plan.scheduled], self.num_steps),
            ignored=tuple(requests.planned.ended),
        )
        requests.dispatch(self.num_steps)
        return batch

    def _count_running(self) -> tuple[int, int]:
        """The running sequences that have one token to compute, and all that run or will once their prompts are
        computed."""
        running, num_decodes, num_seqs = SequenceStatus.RUNNING, 0, 0
        for group in self.requests.running:
            for seq in group.seqs:
                if seq.status is running:
                    num_decodes += len(seq.token_ids) - seq.num_computed_tokens == 1
                    num_seqs += seq.num_samples
                elif seq.status is SequenceStatus.WAITING:
                    num_seqs += 1
        return num_decodes, num_seqs

    def _new_plan(self, only: Set[SequenceGroup] | None, num_decodes: int, num_seqs: int) -> StepPlan:
        """The step's budgets: a token for each sequence that decodes, and for prompts what the target time allows."""
        requests, limit = self.requests, self.config.max_num_batched_tokens
        budget = limit
        if self.config.target_step_ms is not None:
            known = self.step_time.max_tokens(self.config.target_step_ms / 1e3)
            limit = min(budget, max(known if known is not None else FIRST_CHUNK, num_decodes + MIN_CHUNK))
        scheduled = requests.planned.scheduled
        return StepPlan(budget, max(1, limit - num_decodes), num_seqs, scheduled, only=only, busy=requests.busy())

    def _add_drafts(self, plan: StepPlan) -> None:
        """Have drafts verified with the tokens, rows and blocks that are left. Nothing is preempted for them, and new
        blocks are taken only if each other sequence can still have one more."""
        if self.drafting is None or not self.drafting.may_search:
            return
        most = min(plan.token_budget, self.config.max_num_seqs + self.config.max_draft_rows - plan.num_seqs)
        if most <= 0:
            return
        decodes = [(group, seq) for group, seq, num_tokens in plan.scheduled if takes_drafts(group, seq, num_tokens)]
        if not decodes:
            return
        num_tokens = sum([num_tokens for _, _, num_tokens in plan.scheduled])
        drafts = self.drafting.propose(decodes, num_tokens, most, self.step_time.predict)
        for (group, seq), token_ids in zip(decodes, drafts, strict=True):
            if not token_ids:
                continue
            self.requests.planning_group = group
            if make_slots(plan, self.blocks, seq, len(seq.token_ids) + len(token_ids)):
                plan.drafts[seq.seq_id] = token_ids

    # Running requests

    def _schedule_running(self, plan: StepPlan) -> None:
        """Serve the running requests in order; those further back are preempted when blocks run out."""
        requests, groups, has_room = self.requests, self.requests.running, self.blocks.has_room
        running, index, all_run = SequenceStatus.RUNNING, 0, plan.only is None and not plan.busy
        while index < len(groups) and plan.token_budget > 0:
            requests.planning_group = group = groups[index]
            for seq in group.seqs if all_run or plan.allows(group) else ():
                if seq.status is running:
                    end = seq.num_computed_tokens + 1
                    if end == len(seq.token_ids) and has_room(seq.seq_id, end):  # most sequences in most steps
                        if plan.token_budget > 0:
                            plan.scheduled.append((group, seq, 1))
                            plan.token_budget -= 1
                        continue
                    self._advance(index, group, seq, plan)
                elif seq.status is SequenceStatus.WAITING:
                    self._restart(group, seq, plan, index)
                if index >= len(groups) or groups[index] is not group:
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
        plan.add(group, seq, num_tokens)

    def _make_room(self, index: int, group: SequenceGroup, seq: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Preempt requests behind this one until the sequence can grow; False if it was preempted itself, or has to
        wait for a batch in flight."""
        while not self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, num_tokens):
            plan.preempted = True
            if self.preemptor.preempt_behind(index, plan.busy):
                continue
            if plan.busy:
                return False
            own = group.seqs_in(SequenceStatus.RUNNING)
            if own[-1] is not seq:
                self.preemptor.pause(group, own[-1])
                continue
            if own[0] is not seq:
                self.preemptor.pause(group, seq)
            elif index > 0:
                self.preemptor.preempt(group)
            else:
                self._end_without_blocks(group, seq)
            return False
        return True

    def _end_without_blocks(self, group: SequenceGroup, seq: Sequence) -> None:
        """The sequence cannot grow, and there is no other request to preempt."""
        pool, pins = self.blocks.pool, self.blocks.pins
        group.error = (
            f"stopped after {seq.num_output_tokens} tokens: {seq.num_tokens} tokens and one more do not fit into the "
            f"{pool.num_blocks} blocks of the KV cache, of which {pins.num_blocks} are pinned"
        )
        for ended in [seq] if group.search is None else group.unfinished_seqs:  # a search ends as a whole
            ended.finish(SequenceStatus.FINISHED_LENGTH_CAPPED)
            self.requests.finish(group, ended)
        if group.is_finished:
            self._report(group)

    def _restart(self, group: SequenceGroup, seq: Sequence, plan: StepPlan, index: int) -> None:
        """Restart a sequence that was paused in favour of its request's others; `index` is the request's place."""
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
            if not self.preemptor.preempt_behind(index, plan.busy) and idle:
                self.preemptor.pause(group, idle[-1])

    # The queue

    def _start_queued(self, plan: StepPlan) -> None:
        """Start queued requests in the policy's order while tokens, sequences and blocks are left."""
        requests = self.requests
        if plan.is_full(self.config.max_num_seqs, 1):  # before the policy looks up prefixes
            return
        requests.planning_group = None
        self.adapters.begin_step()
        num_left, waiting = LOOK_AHEAD, self.adapters.waiting
        for group in requests.policy.candidates(self.clock()):
            if num_left == 0:
                return
            if (group.adapter is not None and group.adapter.digest in waiting) or not plan.allows(group):
                continue
            requests.planning_group = group
            if plan.is_full(self.config.max_num_seqs, group.num_wanted_seqs):
                return
            if group.adapter is not None and not self._admit_adapter(group):
                continue
            if not (self._resume(group, plan) if group in requests.swapped else self._start(group, plan)):
                return
            num_left -= 1
            requests.planning_group = None

    def _admit_adapter(self, group: SequenceGroup) -> bool:
        """Whether the request's adapter is in a slot. A request whose adapter cannot be loaded ends; only the log says
        where the adapter's files should be."""
        try:
            return self.adapters.admit(group)
        except CheckpointError as error:
            assert group.adapter is not None
            logger.error("request %s: the adapter could not be loaded: %s", group.request_id, error)
            reason = str(error).replace(group.adapter.folder, "its folder")
            group.error = f"the adapter {group.adapter.name!r} could not be loaded: {reason}"
            self._end_queued(group, SequenceStatus.FINISHED_IGNORED)
            return False

    def _start(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Start a waiting request, or leave it for a step or two while another computes its prefix.

        False if it has to wait for blocks or, as it must run whole, for tokens: then no other request may overtake it.
        """
        waiting = SequenceStatus.WAITING
        seq, *others = [seq for seq in group.seqs if seq.status is waiting and seq.beam_candidates is None]
        if plan.chunk(seq) <= 0:
            return False
        hit = self._look_up(group, seq)
        if hit.is_awaited:
            return True
        status = self.blocks.can_allocate(hit)
        if status is AllocStatus.LATER:
            return False
        if status is AllocStatus.NEVER:
            self._ignore(group)
            return True
        self._begin(group, seq, hit, plan)
        for other in others:
            self._restart(group, other, plan, len(self.requests.running))
        plan.num_seqs += group.num_wanted_seqs
        if group.adapter is not None:
            self.adapters.hold(group)
        self.requests.start(group)
        return True

    def _ignore(self, group: SequenceGroup) -> None:
        """The request can never run."""
        blocks, num_tokens = self.blocks, max(seq.num_tokens for seq in group.unfinished_seqs)
        group.error = f"{num_tokens} tokens never fit into the KV cache of {blocks.config.max_tokens} tokens"
        if blocks.pins.num_blocks:
            group.error += f" while {blocks.pins.num_blocks} of its {blocks.pool.num_blocks} blocks are pinned"
        self._end_queued(group, SequenceStatus.FINISHED_IGNORED)

    def _end_queued(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """End a queued request, whose error has been set."""
        self.requests.remove(group)
        for seq in group.unfinished_seqs:
            seq.finish(status)
        self._report(group)

    def _report(self, group: SequenceGroup) -> None:
        """Report in the batch, or in the next one if this step fails, that a request ended in planning."""
        group.metrics.finished_time = self.clock()
        self.requests.planned.ended.append(group.request_id)

    def _begin(self, group: SequenceGroup, seq: Sequence, hit: PrefixHit, plan: StepPlan) -> None:
        """Give a sequence its prefix and its first tokens."""
        seq.num_computed_tokens = self.blocks.allocate(hit)
        if hit.needs_step:
            self.requests.planned.unsettled.append((group, seq))
        num_tokens = plan.chunk(seq)
        self.blocks.append(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
        self.requests.note("started" if group.metrics.first_scheduled_time is None else "restarted", group)
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = self.clock()
            group.outputs.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        plan.add(group, seq, num_tokens)

    def _resume(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Bring a request back from the host tier and schedule its tokens. False if it has to wait for blocks."""
        requests, seqs = self.requests, group.seqs_in(SequenceStatus.SWAPPED)
        seq_ids = [seq.seq_id for seq in seqs]
        if not self.blocks.can_swap_in(seq_ids, max(seq.num_tokens for seq in seqs)):
            if not requests.running:  # blocks have been pinned meanwhile: each sequence alone may still fit
                requests.reset_swapped(group)
            return False
        self.blocks.swap_in(seq_ids)
        requests.note("swapped in", group)
        for seq in seqs:
            seq.status = SequenceStatus.RUNNING
            requests.planned.unsettled.append((group, seq))
            num_tokens = plan.chunk(seq)
            end = seq.num_computed_tokens + num_tokens
            if num_tokens > 0 and self.blocks.can_append(seq.seq_id, seq.num_computed_tokens, end):
                self.blocks.append(seq.seq_id, seq.num_computed_tokens, end)
                plan.add(group, seq, num_tokens)
        plan.num_seqs += group.num_wanted_seqs
        requests.start(group)
        return True
