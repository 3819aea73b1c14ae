"""What a step's result changes: the one place where requests advance and finish."""

import time
from collections.abc import Callable

from quire.batch import Batch, StepResult
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.grammar.state import GrammarState
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
                if num_draws == 1:
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
        group.seqs += [self.scheduler.fork(group, seq, draw) for draw in seq.draws[1:]]
        seq.draws = seq.draws[:1]

    def _append(self, group: SequenceGroup, seq: Sequence, token_id: int) -> None:
        grammar = seq.grammar
        if grammar is not None:
            may_end = grammar.may_end
            if not grammar.advance(token_id):
                self._break_off(group, seq, may_end)
                return
        self._add(group, seq, token_id)
        if grammar is not None and not seq.status.is_finished:
            self._jump(group, seq, grammar)

    def _jump(self, group: SequenceGroup, seq: Sequence, grammar: GrammarState) -> None:
        """Append the tokens that the grammar forces, without a draw."""
        for token_id in grammar.forced_tokens():
            grammar.advance(token_id)
            self._add(group, seq, token_id)
            if seq.status.is_finished:
                break

    def _break_off(self, group: SequenceGroup, seq: Sequence, may_end: bool) -> None:
        """The drawn token cannot be taken: the grammar has become too complex, or allows none but an end that the model
        has no token for. The output ends with the tokens before, well if they are a whole sentence."""
        assert seq.grammar is not None
        seq.status = SequenceStatus.FINISHED_STOPPED
        if not may_end:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
            reason = seq.grammar.error or "the grammar does not allow the token that was drawn"
            group.error = f"stopped after {seq.num_output_tokens} tokens: {reason}"
        self._finish(group, seq)

    def _add(self, group: SequenceGroup, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        self.num_generated_tokens += 1
        matched = seq.detokenizer.append(token_id) if seq.detokenizer is not None else None
        if self._check_stop(group.params, seq, token_id, matched):
            self._finish(group, seq)

    def _finish(self, group: SequenceGroup, seq: Sequence) -> None:
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
        elif seq.grammar is not None and seq.grammar.is_finished:
            seq.status = SequenceStatus.FINISHED_STOPPED
        elif num_tokens - seq.num_prompt_tokens == params.max_tokens or num_tokens >= self.max_model_len:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
        else:
            return False
        return True

    def replace_beam(self, group: SequenceGroup, loser: Sequence, parent: Sequence, last_token_id: int) -> None:
        """Another running sequence's past, but for the last token, takes the place of the loser's."""
        child = self.scheduler.fork(group, parent, loser.draws[0])
        child.token_ids[-1] = last_token_id
        group.seqs[group.seqs.index(loser)] = child
        self.scheduler.finish(group, loser)
