"""The requests that have not finished, and where each one is. This module does not import torch."""

from bisect import insort
from collections.abc import Set

import msgspec

from quire.common.batch import Draw
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.policy import SchedulingPolicy
from quire.kv.block_space_manager import BlockSpaceManager


class InFlight(msgspec.Struct):
    """A batch while it is planned, and then until `settle` or `revert` says what became of it."""

    unsettled: list[tuple[SequenceGroup, Sequence]] = []
    """Sequences with blocks that hold the right content only once the batch has been executed."""
    ended: list[str] = []
    """Ids of requests that ended while the batch was planned."""
    scheduled: list[tuple[SequenceGroup, Sequence, int]] = []
    """The sequences that run in it, with their requests and their numbers of tokens."""


class UnfinishedRequests:
    """Knows where each unfinished request is: it is queued or runs, and it may be part of batches in flight.

    Owns the list of running requests and the status of each unfinished sequence; the policy owns the queue of all other
    requests. A request's blocks are freed here when it ends. The scheduler and the preemptor move requests, commit
    forks and finishes them, and the engine adds and removes them.
    """

    def __init__(self, policy: SchedulingPolicy, blocks: BlockSpaceManager) -> None:
        self.policy = policy
        self.blocks = blocks
        self.running: list[SequenceGroup] = []
        """In the policy's order: when blocks run out, a request further back is preempted."""
        self.swapped: set[SequenceGroup] = set()
        """The queued requests whose blocks are in the host tier."""
        self.owners: dict[int, tuple[SequenceGroup, Sequence]] = {}
        """By id, each unfinished sequence and its request. Others only read it."""
        self.journal: list[tuple[str, SequenceGroup]] | None = None
        """What happens to requests, in order, while a live view is open; the view empties it. None without a view."""
        self.planning_group: SequenceGroup | None = None
        """The request that is being planned. If `schedule` raises, the one whose planning failed, or None if it was no
        request's."""
        self.planned = InFlight()
        """Of the step that is being planned, or will be next."""
        self._in_flight: dict[int, InFlight] = {}  # by step
        self._next_seq_id = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.policy)

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue, without those in the host tier."""
        return len(self.policy) - len(self.swapped)

    def new_seq_id(self) -> int:
        """Return an id for a sequence. Ids ascend: that of the first sequence is the request's place by arrival."""
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def note(self, event: str, group: SequenceGroup) -> None:
        """Write down an event for the live view, if one is open."""
        if self.journal is not None:
            self.journal.append((event, group))

    # From arrival to end

    def add(self, group: SequenceGroup) -> None:
        """Queue a new request."""
        for seq in group.seqs:
            self.owners[seq.seq_id] = (group, seq)
        self.policy.add(group)

    def fork(self, group: SequenceGroup, parent: Sequence, draw: Draw) -> Sequence:
        """Return a new sequence with the history of another, whose blocks it shares. The caller adds it to `group`."""
        child = parent.fork(self.new_seq_id(), draw)
        if parent.seq_id in self.blocks:
            self.blocks.fork(parent.seq_id, child.seq_id)
        self.owners[child.seq_id] = (group, child)
        self.note("forked", group)
        return child

    def finish(self, group: SequenceGroup, seq: Sequence) -> bool:
        """Free the blocks of a sequence that has finished or is dropped; end the request with its last sequence.
        Returns whether it has ended."""
        if seq.seq_id in self.blocks:
            self.blocks.publish_tail(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        self._forget(seq)
        if not group.is_finished:
            return False
        self.running.remove(group)
        self.policy.forget(group)
        self.note("finished", group)
        return True

    def remove(self, group: SequenceGroup) -> None:
        """Forget an unfinished request and free its blocks. Its status stays."""
        if group in self.policy:
            self.policy.remove(group)
            self.swapped.discard(group)
        else:
            self.running.remove(group)
        for seq in group.unfinished_seqs:
            self._forget(seq)
        self.policy.forget(group)
        self.note("finished", group)

    def _forget(self, seq: Sequence) -> None:
        self.blocks.forget(seq.seq_id)
        del self.owners[seq.seq_id]

    # Between the queue and the running requests

    def place(self, group: SequenceGroup) -> tuple[float, int]:
        """A running request's place in the order: those further back are preempted first."""
        return self.policy.rank(group), group.order

    def start(self, group: SequenceGroup) -> None:
        """A queued request runs from now on."""
        self.policy.remove(group)
        self.swapped.discard(group)
        insort(self.running, group, key=self.place)

    def queue(self, group: SequenceGroup) -> None:
        """A running request is queued again."""
        self.running.remove(group)
        self.policy.add(group)

    def reset(self, seq: Sequence) -> None:
        """Free a sequence's blocks, so that all its tokens have to be computed again."""
        self.blocks.free(seq.seq_id)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING

    def reset_swapped(self, group: SequenceGroup) -> None:
        """Free the blocks of a queued request in the host tier, which computes all its tokens again."""
        for seq in group.seqs_in(SequenceStatus.SWAPPED):
            self.reset(seq)
        self.swapped.remove(group)

    # Batches in flight

    def busy(self) -> Set[SequenceGroup]:
        """The requests of all batches in flight."""
        in_flight = self._in_flight
        return {group for step in in_flight.values() for group, _, _ in step.scheduled} if in_flight else frozenset()

    def dispatch(self, step: int) -> None:
        """The step has been planned, and its batch is in flight from now on."""
        self._in_flight[step], self.planned = self.planned, InFlight()

    def settle(self, step: int) -> None:
        """The batch of this step has been executed."""
        self._in_flight.pop(step)
        self.blocks.settle(step)

    def revert(self, step: int | None = None) -> None:
        """The batch of this step failed, or the step being planned if None. Sequences that rely on blocks it was to
        swap, or on another sequence's, start again, since those may be there or not; all others are as before."""
        failed = self.planned if step is None else self._in_flight.pop(step)
        for group, seq in failed.unsettled:
            if seq.seq_id not in self.owners:  # aborted while the step ran
                continue
            if seq.status is not SequenceStatus.WAITING:
                self.reset(seq)
            if group in self.swapped:
                self.swapped.remove(group)
            elif group in self.running and not group.seqs_in(SequenceStatus.RUNNING):
                self.queue(group)
        self.planned = InFlight(ended=failed.ended + ([] if step is None else self.planned.ended))
        self.blocks.revert(self.blocks.step if step is None else step)

    def check_integrity(self) -> None:
        """AssertionError unless every sequence with blocks is known, every known sequence is unfinished and its request
        runs or is queued, and the blocks are in order."""
        running = set(self.running)
        assert len(running) == len(self.running), "a request is in the list of running requests twice"
        for seq_id, (group, seq) in self.owners.items():
            assert any(other is seq for other in group.unfinished_seqs), f"sequence {seq_id} has finished"
            assert (group in running) != (group in self.policy), (
                f"request {group.request_id!r} is in no queue, or in two"
            )
        assert all(seq_id in self.owners for seq_id, _, _ in self.blocks.holdings()), (
            "blocks belong to an unknown sequence"
        )
        self.blocks.check_integrity()
