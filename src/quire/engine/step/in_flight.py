"""Batches that an executor computes at once, each for other requests. This module does not import torch."""

from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import Protocol, runtime_checkable

from quire.common.batch import Batch, ScheduledSequence
from quire.engine.requests.sequence import SequenceGroup
from quire.engine.scheduling.unfinished import UnfinishedRequests


@runtime_checkable
class Pipelined(Protocol):
    """An executor that begins with further batches before it has finished the first."""

    num_in_flight: int
    """Batches that it computes at once."""

    def submit(self, batch: Batch) -> None:
        """Begin with a batch. `execute` is called with submitted batches in the same order; some may be left out."""


class StepsInFlight:
    """Batches that are planned and not committed, the oldest first.

    Each has requests that are in none of the others. So that some are left for the next one, a batch gets at most its
    share of the running requests. While the cause of a failure is looked for, one batch is in flight.
    """

    def __init__(self, requests: UnfinishedRequests, executor: object) -> None:
        self._requests = requests
        self._executor = executor if isinstance(executor, Pipelined) else None
        self._depth = 1 if self._executor is None else self._executor.num_in_flight
        self._batches = deque[Batch]()
        self._num_submitted = 0
        self._failed: Batch | None = None

    def has_room(self, only: Set[SequenceGroup] | None, groups: Iterable[SequenceGroup]) -> bool:
        """Whether to plan another batch, of all requests `groups`, or of `only` some."""
        if not self._batches:
            return True
        if only is not None or len(self._batches) >= self._depth:
            return False
        busy = self._requests.busy()
        return any(group not in busy for group in groups)

    def share(self, only: Set[SequenceGroup] | None, groups: Iterable[SequenceGroup]) -> Set[SequenceGroup] | None:
        """The requests that may run in the next batch; None for all that are in no other."""
        if only is not None or self._depth == 1:
            return only
        busy, running = self._requests.busy(), self._requests.running
        waiting = set([group for group in running if group not in busy][-(-len(running) // self._depth) :])
        return {group for group in groups if group not in waiting} if waiting else None

    def add(self, batch: Batch) -> None:
        """A batch has been planned."""
        self._failed = None
        self._batches.append(batch)

    def submit(self) -> None:
        """Let the executor begin with what has been planned."""
        if self._executor is not None:
            for batch in list(self._batches)[self._num_submitted :]:
                self._num_submitted += 1
                self._executor.submit(batch)

    @property
    def oldest(self) -> Batch:
        """The one to be executed next."""
        return self._batches[0]

    def take(self) -> None:
        """The oldest one has been executed, and is committed now."""
        self._batches.popleft()
        self._num_submitted -= self._num_submitted > 0

    def revert(self) -> None:
        """Undo all plans: the oldest one's step has failed, or they are not to be executed any more."""
        self._num_submitted, self._failed = 0, next(iter(self._batches), None)
        while self._batches:
            self._requests.revert(self._batches.pop().step)

    def take_failed(self) -> Sequence[ScheduledSequence]:
        """The sequences of the step that has failed, if one has since this was last called."""
        failed, self._failed = self._failed, None
        return () if failed is None else failed.sequences
