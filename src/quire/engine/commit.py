"""What a step's result changes: the one place where requests advance and finish."""

import time
from collections.abc import Callable, Mapping

from quire.batch import Batch, StepResult
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence, SequenceGroup, SequenceStatus


class Committer:
    """Appends tokens, publishes computed blocks, decides who has finished."""

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

    def commit(
        self, batch: Batch, result: StepResult, owners: Mapping[int, tuple[SequenceGroup, Sequence]]
    ) -> list[SequenceGroup]:
        """Apply a step; `owners` finds a sequence by its id. Returns the requests that got a token, in batch order."""
        drawn = iter(result.token_ids)
        changed = []
        for scheduled in batch.sequences:
            token_id = next(drawn) if scheduled.draw is not None else None
            owner = owners.get(scheduled.seq_id)
            if owner is None:  # aborted while the step ran
                continue
            group, seq = owner
            seq.num_computed_tokens = scheduled.end
            self.scheduler.blocks.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            if token_id is not None:
                if seq.num_output_tokens == 0:
                    self.scheduler.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
                self._append(group, seq, token_id)
                changed.append(group)
        for group in changed:
            if group.is_finished:
                group.metrics.finished_time = self.clock()
                for seq in group.seqs:
                    self.scheduler.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
                self.scheduler.remove(group)
        return changed

    def _append(self, group: SequenceGroup, seq: Sequence, token_id: int) -> None:
        if seq.num_output_tokens == 0:
            group.metrics.first_token_time = self.clock()
            self.num_prompt_tokens += seq.num_prompt_tokens
        seq.token_ids.append(token_id)
        self.num_generated_tokens += 1
        matched = seq.detokenizer.append(token_id) if seq.detokenizer is not None else None
        self._check_stop(group, seq, token_id, matched)

    def _check_stop(self, group: SequenceGroup, seq: Sequence, token_id: int, matched: str | None) -> None:
        params = group.params
        if not params.ignore_eos and token_id in self.eos_token_ids:
            seq.status = SequenceStatus.FINISHED_STOPPED
        elif token_id in (params.stop_token_ids or ()):
            seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, token_id
        elif matched is not None:
            seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, matched
        elif seq.num_output_tokens == params.max_tokens or seq.num_tokens >= self.max_model_len:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
