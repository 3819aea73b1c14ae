"""What the scheduler remembers of a batch until it knows what became of it."""

from dataclasses import dataclass, field

from quire.engine.requests.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class InFlight:
    """A batch between `schedule` and `settle` or `revert`."""

    unsettled: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    """Sequences with blocks that hold the right content only once the batch has been executed."""
    ended: list[str] = field(default_factory=list)
    """Ids of requests that ended while the batch was planned."""
    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    """The sequences that run in it, with their numbers of tokens."""
