"""Running requests that get one token in each step, without work for each token.

Most of a simulation is such steps. Here the tokens of a request are computed several at once, when something reads
them: when a block is full, and when the request ends or the scheduler plans the step by itself. All that others can see
changes in the same step, in the same order and by the same calls as if the scheduler and commit did it: blocks, ends,
times and routes.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from quire.common.batch import Batch
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.interfaces.simulate.fake_model import FakeModel


@dataclass(slots=True, eq=False)
class _Decode:
    """A request of one sequence, which has all its tokens but the newest computed."""

    group: SequenceGroup
    seq: Sequence
    place: tuple[float, int]
    """Its place in the order of running requests."""
    offset: int
    """Its number of tokens, less the number of steps that the lane had then made."""
    last: int
    """The step in which it ends."""


class DecodeLane:
    """The decoding requests of one engine. In each of its steps, the caller asks `may_plan`, and then calls `plan` and
    `commit`; otherwise `leave`, before it plans the step by the scheduler. After each commit it calls `join`.

    It owns the tokens and the computed length of its requests, which are behind until `catch_up`.
    """

    def __init__(self, scheduler: Scheduler, committer: Committer, model: FakeModel) -> None:
        self._scheduler, self._committer, self._model = scheduler, committer, model
        self._requests, self._blocks = scheduler.requests, scheduler.blocks
        self._is_possible = (
            scheduler.drafting is None
            and not scheduler.requests.policy.counts_tokens
            and not any(pool.num_blocks for pool in self._blocks.tiers.pools[1:])
        )
        self._decodes: list[_Decode] = []
        """In the order of running requests."""
        self._step = 0
        """Number of steps made; the one that is planned or runs has this number, too."""
        self._growing: defaultdict[int, list[_Decode]] = defaultdict(list)
        """By step, those that need another block then."""
        self._due: defaultdict[int, list[_Decode]] = defaultdict(list)
        """By step, those that fill a block then, or end."""
        self._has_batch = True
        """Whether the step that runs has a batch."""
        self.context = 0
        """Number of computed tokens of all its requests."""
        self.on_join: Callable[[SequenceGroup], object] = lambda group: None
        """Called with each request that joins."""
        self.on_leave: Callable[[SequenceGroup], object] = lambda group: None
        """Called with each request that leaves."""

    def __len__(self) -> int:
        return len(self._decodes)

    @property
    def groups(self) -> list[SequenceGroup]:
        """Its requests, in the order of running requests."""
        return [decode.group for decode in self._decodes]

    def may_plan(self) -> bool:
        """Whether all running requests are in the lane, and there are blocks for those that need another one."""
        num, growing = len(self._decodes), self._growing.get(self._step)
        if not self._is_possible or num != len(self._requests.running):
            return False
        if num > self._scheduler.config.max_num_batched_tokens:
            return False
        if growing is None:
            return True
        most = 2 * self._blocks.num_groups  # another block, and a copy of one that others hold
        if self._blocks.pool.num_free_blocks >= most + len(growing) * self._blocks.num_groups:
            return True
        can_append, step = self._blocks.can_append, self._step
        ends = [(decode.seq.seq_id, decode.offset + step) for decode in growing]
        return all(can_append(seq_id, end - 1, end, len(growing)) for seq_id, end in ends)

    def plan(self) -> Batch | None:
        """Begin a step, in which each of the requests gets a token. The batch has the requests that start beside them;
        None if none is queued."""
        blocks, scheduler, step = self._blocks, self._scheduler, self._step
        growing = _in_order(self._growing.pop(step, ()))
        ends = [(decode.seq.seq_id, decode.offset + step) for decode in growing]
        batch = None
        self._has_batch = len(self._requests.policy) > 0
        if self._has_batch:
            batch = scheduler.schedule_beside(len(self._decodes), ends)
        else:
            scheduler.num_steps += 1
            blocks.advance(is_open=False)
            for seq_id, end in ends:
                blocks.append(seq_id, end - 1, end)
        for decode in growing:
            self._expect_growth(decode)
        return batch

    def commit(self) -> list[SequenceGroup]:
        """End the step; returns the requests of the lane that have ended with it."""
        if self._has_batch:
            self._requests.settle(self._scheduler.num_steps)
        num, due = len(self._decodes), _in_order(self._due.pop(self._step, ()))
        self.context += num
        ended = [decode.group for decode in due if self._advance(decode)]
        self._committer.num_generated_tokens += num - len(ended)  # `add` counts the others
        self._step += 1
        return ended

    def _advance(self, decode: _Decode) -> bool:
        """Let a request fill its block, or get its last token, in this step. Returns whether it has ended."""
        seq, step, block_size = decode.seq, self._step, self._blocks.block_size
        end = decode.offset + step
        self._catch_up(seq, end)
        seq.num_computed_tokens = end
        if not end % block_size:
            self._blocks.publish(seq.seq_id, seq.token_ids, end)
        if step < decode.last:
            self._due[min(step + block_size, decode.last)].append(decode)
            return False
        self._decodes.remove(decode)
        self.on_leave(decode.group)
        self.context -= end
        self._committer.add(decode.group, seq, self._next_tokens(seq, 1)[0])
        return True

    def join(self, changed: list[SequenceGroup]) -> None:
        """Take in the requests that a commit has changed, if then all that run are in the lane."""
        if not self._is_possible:
            return
        fitting = [group for group in changed if _fits(group)]
        if len(self._decodes) + len(fitting) != len(self._requests.running):
            return
        block_size, max_model_len = self._blocks.block_size, self._committer.max_model_len
        for group in fitting:
            seq = group.seqs[0]
            num_tokens = len(seq.token_ids)
            most = min(max_model_len, seq.num_prompt_tokens + (group.params.max_tokens or max_model_len))
            last = self._step + most - num_tokens - 1
            decode = _Decode(group, seq, self._requests.place(group), num_tokens - self._step, last)
            insort(self._decodes, decode, key=_place)
            self._due[min(self._step + -num_tokens % block_size, last)].append(decode)
            self._expect_growth(decode)
            self.context += num_tokens - 1
            self.on_join(group)

    def leave(self) -> None:
        """Remove all requests from the lane, before the scheduler plans the step or after the engine's death."""
        if self._decodes:
            self.catch_up()
            for decode in self._decodes:
                self.on_leave(decode.group)
            self._decodes.clear()
            self._growing.clear()
            self._due.clear()
            self.context = 0
        self._has_batch = True

    def catch_up(self) -> None:
        """Give all requests the tokens that they have got."""
        for decode in self._decodes:
            end = decode.offset + self._step
            self._catch_up(decode.seq, end)
            decode.seq.num_computed_tokens = end - 1

    def _catch_up(self, seq: Sequence, num_tokens: int) -> None:
        num_missing = num_tokens - len(seq.token_ids)
        if num_missing:
            seq.extend(self._next_tokens(seq, num_missing))

    def _next_tokens(self, seq: Sequence, num: int) -> list[int]:
        token_ids = seq.token_ids
        return self._model.next_tokens(seq.seq_id, len(token_ids) - 1, token_ids[-1], seq.draws[0].index, num)

    def _expect_growth(self, decode: _Decode) -> None:
        """Note the step in which the request needs another block, if it does not end before."""
        step, block_size, has_room = self._step, self._blocks.block_size, self._blocks.has_room
        while step <= decode.last and has_room(decode.seq.seq_id, end := decode.offset + step):
            step += block_size - (end - 1) % block_size  # blocks are given out whole
        if step <= decode.last:
            self._growing[step].append(decode)


_place = attrgetter("place")


def _in_order(decodes: list[_Decode] | tuple[()]) -> list[_Decode] | tuple[()]:
    """Sort requests by their place among the running ones."""
    return sorted(decodes, key=_place) if len(decodes) > 1 else decodes


def _fits(group: SequenceGroup) -> bool:
    """Whether it is a request of one sequence that runs and has only its newest token to compute."""
    seq = group.seqs[0]
    return (
        len(group.seqs) == 1
        and group.search is None
        and seq.status is SequenceStatus.RUNNING
        and seq.num_computed_tokens + 1 == len(seq.token_ids)
        and bool(seq.output.token_ids)
    )
