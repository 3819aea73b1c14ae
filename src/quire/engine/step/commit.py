"""What a step's result changes: the one place where requests advance and finish."""

import time
from collections.abc import Callable

from quire.common.batch import Batch, StepResult
from quire.common.errors import failure
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.engine.requests.beam_search import advance_beams
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.scheduler import Scheduler
from quire.text.grammar.state import GrammarState


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
        """Apply a step. Returns the requests that got a token or finished, in batch order.

        What fails of a request's own ends that request. Any other exception means that the accounts are wrong.
        """
        blocks, policy = self.scheduler.blocks, self.scheduler.policy
        self.scheduler.settle()
        find_owner, publish, counts_tokens = self.scheduler.owner, blocks.publish, policy.counts_tokens
        changed: list[SequenceGroup] = []
        num_drawn = 0
        for place, scheduled in enumerate(batch.sequences):
            num_draws = len(scheduled.draws)
            draws = range(num_drawn, num_drawn + num_draws)
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
            try:
                if scheduled.scored is not None and seq.scores is not None:
                    seq.scores.rows.extend(result.scored[place])
                is_changed = self._take(group, seq, result, draws)
            except Exception as error:
                self._fail(group, failure(group.request_id, "when its tokens were taken", error), error)
                is_changed = True
            if is_changed and (not changed or changed[-1] is not group):
                changed.append(group)
        return changed

    def _take(self, group: SequenceGroup, seq: Sequence, result: StepResult, draws: range) -> bool:
        """Go on with what was drawn, at these places of the result; whether the request's caller hears of it."""
        fault_point("commit.sequence", seq.seq_id)
        if not draws:
            if seq.draws or seq.num_computed_tokens < len(seq.token_ids):
                return False
            self._note_prompt(group, seq)
            self._finish(group, seq, SequenceStatus.FINISHED_LENGTH_CAPPED)
            return True
        if seq.num_computed_tokens == seq.num_prompt_tokens:
            self._fork_samples(group, seq)
        if result.errors and any(draw in result.errors for draw in draws):
            reason = next(result.errors[draw] for draw in draws if draw in result.errors)
            self._fail(group, f"request {group.request_id!r}: {reason}")
        elif group.search is not None:
            seq.held = result.logprobs[draws[0]]
            self.num_generated_tokens += 1
            self._advance_beams(group)
        elif len(draws) == 1:
            self._append(group, seq, result, draws[0])
        else:
            for sample, draw in zip(group.seqs, draws, strict=True):
                self._append(group, sample, result, draw)
        return True

    def _fork_samples(self, group: SequenceGroup, seq: Sequence) -> None:
        """The prompt is computed: its samples go their own ways now."""
        self._note_prompt(group, seq)
        self.scheduler.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        if group.search is None:  # beams are forked where they part
            group.seqs += [self.scheduler.fork(group, seq, draw) for draw in seq.draws[1:]]
        seq.draws = seq.draws[:1]

    def _fail(self, group: SequenceGroup, reason: str, error: Exception | None = None) -> None:
        """The request's own work failed: it ends, and no other notices. An `error` that nobody foresaw may have come in
        the middle of a change: AssertionError if the accounts are wrong."""
        group.error = reason
        group.metrics.finished_time = self.clock()
        unfinished = group.unfinished_seqs
        self.scheduler.remove(group)
        for seq in unfinished:
            seq.status = SequenceStatus.FINISHED_ABORTED
        if error is not None:
            logger.error("%s", reason, exc_info=error)
            self.scheduler.check_integrity()

    def _note_prompt(self, group: SequenceGroup, seq: Sequence) -> None:
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = self.clock()
            self.num_prompt_tokens += seq.num_prompt_tokens

    def _append(self, group: SequenceGroup, seq: Sequence, result: StepResult, draw: int) -> None:
        """The token that was drawn at this place of the result."""
        token_id, grammar = result.token_ids[draw], seq.grammar
        if grammar is not None:
            may_end = grammar.may_end
            if not grammar.advance(token_id):
                self._break_off(group, seq, may_end)
                return
        if seq.logprobs is not None:
            seq.logprobs.extend(result.logprobs[draw])
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
        if not may_end:
            reason = seq.grammar.error or "the grammar does not allow the token that was drawn"
            group.error = f"stopped after {seq.num_output_tokens} tokens: {reason}"
        status = SequenceStatus.FINISHED_STOPPED if may_end else SequenceStatus.FINISHED_LENGTH_CAPPED
        self._finish(group, seq, status)

    def _add(self, group: SequenceGroup, seq: Sequence, token_id: int) -> None:
        self.num_generated_tokens += 1
        status = append_token(group, seq, token_id, self.eos_token_ids) or self._limit_reached(group, seq)
        if status is not None:
            self._finish(group, seq, status)

    def _limit_reached(self, group: SequenceGroup, seq: Sequence) -> SequenceStatus | None:
        if seq.grammar is not None and seq.grammar.is_finished:
            return SequenceStatus.FINISHED_STOPPED
        num_tokens = len(seq.token_ids)
        if num_tokens - seq.num_prompt_tokens == group.params.max_tokens or num_tokens >= self.max_model_len:
            return SequenceStatus.FINISHED_LENGTH_CAPPED
        return None

    def _finish(self, group: SequenceGroup, seq: Sequence, status: SequenceStatus) -> None:
        seq.status = status
        if group.is_finished:
            group.metrics.finished_time = self.clock()
        self.scheduler.finish(group, seq)

    def _advance_beams(self, group: SequenceGroup) -> None:
        advance_beams(self.scheduler, group)
        if group.is_finished:
            group.metrics.finished_time = self.clock()


def append_token(
    group: SequenceGroup, seq: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> SequenceStatus | None:
    """Append a token. FINISHED_STOPPED if it is a stop token, or completes a stop string. Its text goes on, but for a
    stop token's."""
    seq.token_ids.append(token_id)
    params, num_output_tokens = group.params, len(seq.token_ids) - seq.num_prompt_tokens
    is_eos = token_id in eos_token_ids and not params.ignore_eos
    is_stop = (is_eos or token_id in group.stop_token_ids) and num_output_tokens > params.min_tokens
    matched = None
    if seq.detokenizer is not None and (not is_stop or params.include_stop_str_in_output):
        matched = seq.detokenizer.append(token_id)
    if not is_stop and matched is None:
        return None
    seq.stop_reason = matched if not is_stop else None if is_eos else token_id
    return SequenceStatus.FINISHED_STOPPED
