"""What a step's result changes: the one place where requests advance and finish."""

import time
from collections.abc import Callable, Collection

from quire.common.batch import Batch, StepResult, accepted_drafts
from quire.common.errors import failure
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.config.speculative import PREDICTION
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.model_drafts import ModelDrafts
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.unfinished import UnfinishedRequests
from quire.engine.step.advance_beams import advance_beams
from quire.text.grammar.state import GrammarState


class Committer:
    """Publishes computed blocks, forks samples, appends tokens, and decides which sequences have finished."""

    def __init__(
        self,
        requests: UnfinishedRequests,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafting | None = None,
    ) -> None:
        """`drafting` has proposed the drafts in the batches, and learns what came of them."""
        self.requests = requests
        self.max_model_len = max_model_len
        self.clock = clock
        self.drafting = drafting
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompts and outputs so far."""
        return self.num_prompt_tokens + self.num_generated_tokens

    def commit(self, batch: Batch, result: StepResult) -> list[SequenceGroup]:
        """Apply a step. Returns the requests that got a token or finished, in batch order.

        An error in a request's own work ends that request. Any other exception means that the internal accounting is
        inconsistent.
        """
        self.requests.settle(batch.step)
        return self.apply(batch, result)

    def apply(self, batch: Batch, result: StepResult) -> list[SequenceGroup]:
        """As `commit`, of a step that has been settled."""
        find_owner, blocks, policy = self.requests.owners.get, self.requests.blocks, self.requests.policy
        publish, counts_tokens = blocks.publish, policy.counts_tokens
        changed: list[SequenceGroup] = []
        if result.has_lost_drafts and self.drafting is not None:
            self.drafting.num_errors[ModelDrafts.name] += 1
        first = 0  # index of the sequence's first drawn token in the result
        for place, scheduled in enumerate(batch.sequences):
            drawn, num_drawn = scheduled.drawn, 0
            if drawn is not None:
                num_drawn = len(drawn.draws) * drawn.num_rows
            draws, first = range(first, first + num_drawn), first + num_drawn
            owner = find_owner(scheduled.seq_id)
            if owner is None:  # aborted while the step ran
                continue
            group, seq = owner
            end, token_ids = scheduled.start + len(scheduled.token_ids), seq.token_ids
            if drawn is not None and drawn.num_rows > 1:
                accepted = accepted_drafts(scheduled, result.token_ids[draws.start : draws.stop])
                end += len(accepted) - scheduled.num_drafts
                token_ids, draws = token_ids + accepted, draws[: len(accepted) + 1]
                if self.drafting is not None and seq.drafting is not None:
                    self.drafting.observe(group, seq, scheduled.num_drafts, len(accepted))
                    group.metrics.count_drafts(seq.drafting.drafter, scheduled.num_drafts, len(accepted))
            seq.num_computed_tokens = end
            if self.drafting is not None and place in result.drafted:
                self.drafting.receive(seq, end, result.drafted[place])
            publish(scheduled.seq_id, token_ids, end)
            if scheduled.ahead is not None or end < scheduled.end:
                blocks.shrink(scheduled.seq_id, end)  # no other request waits for slots of wrong drafts
            if counts_tokens:
                served = max(seq.num_served_tokens, scheduled.start)  # cached and recomputed tokens are free
                policy.charge(group, max(0, end - served))
                seq.num_served_tokens = max(served, end)
            try:
                if scheduled.scored is not None and seq.scores is not None:
                    seq.scores.rows.extend(result.scored[place])
                is_changed = self._take(group, seq, result, place, draws)
            except Exception as error:
                self._fail(group, failure(group.request_id, "when its tokens were added", error), error)
                is_changed = True
            if is_changed and (not changed or changed[-1] is not group):
                changed.append(group)
        return changed

    def add(self, group: SequenceGroup, seq: Sequence, token_id: int) -> None:
        """Append a token to a sequence, which may end with it."""
        self.num_generated_tokens += 1
        seq.token_ids.append(token_id)
        num_tokens = len(seq.token_ids)
        if seq.output.append(token_id) or (seq.grammar is not None and seq.grammar.is_finished):
            self._finish(group, seq, SequenceStatus.FINISHED_STOPPED)
        elif num_tokens - seq.num_prompt_tokens == group.params.max_tokens or num_tokens >= self.max_model_len:
            self._finish(group, seq, SequenceStatus.FINISHED_LENGTH_CAPPED)

    def _take(self, group: SequenceGroup, seq: Sequence, result: StepResult, place: int, draws: range) -> bool:
        """Continue with what the result has for the sequence at this place of the batch: the tokens drawn at these
        indices, or what was pooled. Returns whether the request has changed."""
        fault_point("commit.sequence", seq.seq_id)
        if not draws:
            if seq.draws or seq.num_computed_tokens < len(seq.token_ids):
                return False
            self._note_prompt(group, seq)
            if place in result.pool_errors:
                self._fail(group, f"request {group.request_id!r}: {result.pool_errors[place]}")
            elif seq.pooling is not None:
                seq.pooling.result = result.pooled[place]
                self._finish(group, seq, SequenceStatus.FINISHED_STOPPED)
            else:
                self._finish(group, seq, SequenceStatus.FINISHED_LENGTH_CAPPED)
            return True
        if not seq.output.token_ids:
            self._fork_samples(group, seq)
        are_samples = len(draws) > 1 and seq.num_computed_tokens == seq.num_prompt_tokens
        if result.errors and self._has_failed(group, result, draws if are_samples else draws[:1]):
            return True
        if group.search is not None:
            seq.beam_candidates = result.logprobs[draws[0]]
            self.num_generated_tokens += 1
            advance_beams(self.requests, group)
            if group.is_finished:
                group.metrics.finished_time = self.clock()
        elif are_samples:
            for sample, draw in zip(group.seqs, draws, strict=True):
                self._append(group, sample, result, draw)
        else:
            for draw in draws[:-1] if len(draws) > 1 else ():
                place = seq.num_output_tokens
                self._append(group, seq, result, draw, jumps=False)  # later draws depend on it: nothing comes between
                seq.output.accepted_drafts += range(place, seq.num_output_tokens)
                if seq.drafting is not None and seq.drafting.drafter == PREDICTION:
                    seq.output.predicted_drafts += range(place, seq.num_output_tokens)
                if seq.status.is_finished or (result.errors and self._has_failed(group, result, [draw + 1])):
                    return True
            self._append(group, seq, result, draws[-1])
        return True

    def _has_failed(self, group: SequenceGroup, result: StepResult, draws: Collection[int]) -> bool:
        """Whether one of these draws has failed, which ends the request."""
        reason = next((result.errors[draw] for draw in draws if draw in result.errors), None)
        if reason is not None:
            self._fail(group, f"request {group.request_id!r}: {reason}")
        return reason is not None

    def _fork_samples(self, group: SequenceGroup, seq: Sequence) -> None:
        """The prompt is computed: from here on each sample is a sequence of its own."""
        self._note_prompt(group, seq)
        num_computed = min(seq.num_computed_tokens, seq.num_prompt_tokens)  # accepted drafts may follow
        self.requests.blocks.publish_tail(seq.seq_id, seq.token_ids, num_computed)
        if group.search is None:  # beams are forked where they diverge
            group.seqs += [self.requests.fork(group, seq, draw) for draw in seq.draws[1:]]
        if len(seq.draws) > 1:
            seq.draw_with(seq.draws[:1])

    def _fail(self, group: SequenceGroup, reason: str, error: Exception | None = None) -> None:
        """End a request whose own work failed. An unforeseen `error` may have interrupted a change: AssertionError if
        the internal accounting is inconsistent."""
        group.error = reason
        group.metrics.finished_time = self.clock()
        unfinished = group.unfinished_seqs
        self.requests.remove(group)
        for seq in unfinished:
            seq.finish(SequenceStatus.FINISHED_ABORTED)
        if error is not None:
            logger.error("%s", reason, exc_info=error)
            self.requests.check_integrity()

    def _note_prompt(self, group: SequenceGroup, seq: Sequence) -> None:
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = self.clock()
            self.num_prompt_tokens += seq.num_prompt_tokens

    def _append(
        self, group: SequenceGroup, seq: Sequence, result: StepResult, draw: int, *, jumps: bool = True
    ) -> None:
        """Append the token drawn at this index of the result, and with `jumps` those that the grammar then forces."""
        token_id, grammar = result.token_ids[draw], seq.grammar
        if grammar is not None:
            may_end = grammar.may_end
            if not grammar.advance(token_id):
                self._end_rejected(group, seq, may_end)
                return
        if seq.output.logprobs is not None:
            seq.output.logprobs.extend(result.logprobs[draw])
        self.add(group, seq, token_id)
        if grammar is not None and jumps and not seq.status.is_finished:
            self._jump(group, seq, grammar)

    def _jump(self, group: SequenceGroup, seq: Sequence, grammar: GrammarState) -> None:
        """Append the tokens that the grammar forces, without a draw."""
        for token_id in grammar.forced_tokens():
            grammar.advance(token_id)
            self.add(group, seq, token_id)
            if seq.status.is_finished:
                break

    def _end_rejected(self, group: SequenceGroup, seq: Sequence, may_end: bool) -> None:
        """The grammar rejects the drawn token: it has become too complex, or allows only an end that the model has no
        token for. The output ends with the tokens before; without an error if they are a complete sentence of it."""
        assert seq.grammar is not None
        if not may_end:
            reason = seq.grammar.error or "the grammar does not allow the token that was drawn"
            group.error = f"stopped after {seq.num_output_tokens} tokens: {reason}"
        status = SequenceStatus.FINISHED_STOPPED if may_end else SequenceStatus.FINISHED_LENGTH_CAPPED
        self._finish(group, seq, status)

    def _finish(self, group: SequenceGroup, seq: Sequence, status: SequenceStatus) -> None:
        seq.finish(status)
        seq.num_computed_tokens = min(seq.num_computed_tokens, len(seq.token_ids))  # drafts behind a stop are dropped
        if self.drafting is not None:
            self.drafting.finish(group, seq)
        if self.requests.finish(group, seq):
            group.metrics.finished_time = self.clock()
