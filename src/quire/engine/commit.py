"""What a step's result changes: the one place where requests advance and finish."""

import time
from collections.abc import Callable

from quire.batch import Batch, StepResult
from quire.engine.beam_search import advance_beams
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.params import SamplingParams


class Committer:
    """Publishes computed blocks, forks samples, appends tokens, decides who has finished."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.clock = clock
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def commit(self, batch: Batch, result: StepResult) -> list[SequenceGroup]:
        """Apply a step. Returns the requests that got a token, in batch order."""
        blocks, policy = self.scheduler.blocks, self.scheduler.policy
        self.scheduler.settle()
        find_owner, publish, counts_tokens = self.scheduler.owner, blocks.publish, policy.counts_tokens
        changed: list[SequenceGroup] = []
        num_drawn = 0
        for scheduled in batch.sequences:
            num_draws = len(scheduled.draws)
            token_ids = result.token_ids[num_drawn : num_drawn + num_draws]
            num_drawn += num_draws
            owner = find_owner(scheduled.seq_id)
            if owner is None:  # aborted while the step ran
                continue
            group, seq = owner
            seq.num_computed_tokens = end = scheduled.end
            publish(scheduled.seq_id, seq.token_ids, end)
            if counts_tokens:
                served = max(seq.num_served_tokens, scheduled.start)  # what was cached, or is computed again, is free
                policy.charge(group, max(0, end - served))
                seq.num_served_tokens = max(served, end)
            if num_draws:
                if end == seq.num_prompt_tokens:
                    self._fork_samples(group, seq)
                if group.search is not None:
                    seq.held = result.logprobs[num_drawn - num_draws]
                    self.num_generated_tokens += 1
                    self._advance_beams(group)
                elif num_draws == 1:
                    self._append(group, seq, token_ids[0])
                else:
                    for sample, token_id in zip(group.seqs, token_ids, strict=True):
                        self._append(group, sample, token_id)
                if not changed or changed[-1] is not group:
                    changed.append(group)
        return changed

    def _fork_samples(self, group: SequenceGroup, seq: Sequence) -> None:
        """The prompt is computed: its samples go their own ways now."""
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = self.clock()
            self.num_prompt_tokens += seq.num_prompt_tokens
        self.scheduler.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        if group.search is None:  # beams are forked where they part
            group.seqs += [self.scheduler.fork(group, seq, draw) for draw in seq.draws[1:]]
        seq.draws = seq.draws[:1]

    def _append(self, group: SequenceGroup, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        self.num_generated_tokens += 1
        matched = seq.detokenizer.append(token_id) if seq.detokenizer is not None else None
        if self._check_stop(group.params, seq, token_id, matched):
            if group.is_finished:
                group.metrics.finished_time = self.clock()
            self.scheduler.finish(group, seq)

    def _check_stop(self, params: SamplingParams, seq: Sequence, token_id: int, matched: str | None) -> bool:
        """Whether the sequence has finished with this token."""
        num_tokens = len(seq.token_ids)
        if token_id in self.eos_token_ids and not params.ignore_eos:
            seq.status = SequenceStatus.FINISHED_STOPPED
        elif params.stop_token_ids and token_id in params.stop_token_ids:
            seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, token_id
        elif matched is not None:
            seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, matched
        elif num_tokens - seq.num_prompt_tokens == params.max_tokens or num_tokens >= self.max_model_len:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
        else:
            return False
        return True

    def _advance_beams(self, group: SequenceGroup) -> None:
        advance_beams(self.scheduler, group)
        if group.is_finished:
            group.metrics.finished_time = self.clock()
