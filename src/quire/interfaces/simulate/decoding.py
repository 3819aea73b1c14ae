"""Steps in which every running sequence gets one token and nothing else happens, which most steps of a run are.

They change what the scheduler, the block manager and commit would change, by the same calls and in the same order, but
make no Batch: so a simulation takes half of the time.
"""

from __future__ import annotations

from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.interfaces.simulate.fake_model import FakeModel

Decodes = list[tuple[SequenceGroup, Sequence]]


class DecodeSteps:
    """Plans and commits such steps of one engine. The caller asks `plan` before each step of the scheduler."""

    def __init__(self, scheduler: Scheduler, committer: Committer, model: FakeModel) -> None:
        self._scheduler, self._committer, self._model = scheduler, committer, model
        self._requests, self._blocks = scheduler.requests, scheduler.blocks
        self._is_plain = (
            scheduler.drafting is None
            and not scheduler.requests.policy.counts_tokens
            and not any(pool.num_blocks for pool in self._blocks.tiers.pools[1:])
        )

    def plan(self) -> Decodes | None:
        """Return the sequences of the next step, which begins; None, and nothing changes, if it is not as simple."""
        requests, blocks, running = self._requests, self._blocks, SequenceStatus.RUNNING
        most = self._scheduler.config.max_num_batched_tokens
        if not self._is_plain or len(requests.policy) or not 0 < len(requests.running) <= most:
            return None
        decodes: Decodes = []
        growing: list[tuple[int, int]] = []
        for group in requests.running:
            if len(group.seqs) > 1 or group.search is not None:
                return None
            seq = group.seqs[0]
            end = seq.num_computed_tokens + 1
            if seq.status is not running or end != len(seq.token_ids) or not seq.output.token_ids:
                return None
            if not blocks.has_room(seq.seq_id, end):
                growing.append((seq.seq_id, end))
            decodes.append((group, seq))
        if not all(blocks.can_append(seq_id, end - 1, end, len(growing)) for seq_id, end in growing):
            return None  # something has to be preempted, perhaps
        self._scheduler.num_steps += 1
        blocks.advance()
        for seq_id, end in growing:
            blocks.append(seq_id, end - 1, end)
        blocks.take_transfers(self._scheduler.num_steps)
        blocks.take_copies([seq.seq_id for _, seq in decodes], self._scheduler.num_steps)
        requests.dispatch(self._scheduler.num_steps)
        return decodes

    def commit(self, decodes: Decodes) -> list[SequenceGroup]:
        """Give each of the sequences its token; returns their requests."""
        self._requests.settle(self._scheduler.num_steps)
        next_token, publish, add = self._model.next_token, self._blocks.publish, self._committer.add
        block_size = self._blocks.block_size
        for group, seq in decodes:
            end = len(seq.token_ids)
            token_id = next_token(seq.seq_id, end - 1, seq.token_ids[-1], seq.draws[0].index)
            seq.num_computed_tokens = end
            if not end % block_size:
                publish(seq.seq_id, seq.token_ids, end)
            add(group, seq, token_id)
        return [group for group, _ in decodes]
