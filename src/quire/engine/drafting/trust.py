"""How often drafts are right, by drafter, in general and of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.drafting.forced import Walk
from quire.engine.drafting.model_drafts import ModelReading

_PRIOR = 2.0
"""How many tested drafts the expectation before the first test counts as."""
_DECAY = 0.98
"""Of what was learned about a sequence, in each search: after some 50 without a draft, one is tried again."""
_DECAY_FOR_ALL = 0.998
"""Of what was learned about a drafter, in each step that looks for drafts."""
_MOST_TRUST = 2.0
"""Odds may say too little: what a model draws at random half of the time, a greedy request may always have."""


class Trust:
    """How often drafts of one drafter are right, relative to the odds that it states."""

    __slots__ = ("accepted", "expected")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.expected = 0.0

    def factor(self, prior: float) -> float:
        """What to multiply odds by, given what to expect before the first test."""
        return min(_MOST_TRUST, (self.accepted + _PRIOR * prior) / (self.expected + _PRIOR))

    def observe(self, odds: Sequence[float], num_accepted: int) -> None:
        """`num_accepted` drafts were right, and the next one, if there is one, was wrong."""
        self.accepted += num_accepted
        self.expected += sum(odds[: num_accepted + 1])

    def decay(self, factor: float = _DECAY) -> None:
        """Let what was learned count less."""
        self.accepted *= factor
        self.expected *= factor

    def decay_for_all(self) -> None:
        """The same where all sequences are counted together."""
        self.decay(_DECAY_FOR_ALL)


@dataclass(slots=True)
class SequenceDrafts:
    """What is known about the drafts of one sequence."""

    trust: dict[str, Trust]
    """By drafter."""
    drafter: str = ""
    """Whose drafts were proposed last."""
    odds: tuple[float, ...] = ()
    """Theirs, as it stated them."""
    pause: int = 0
    """Steps in which no draft is looked for."""
    num_failures: int = 0
    """Consecutive attempts that gave no right draft."""
    reading: ModelReading = field(default_factory=ModelReading)
    """How far a draft model is."""
    predicted: tuple[int, int] = (0, 0)
    """How many tokens the output had at the latest search, and where in the prediction it was then."""
    walk: Walk | None = None
    """The latest one through the grammar."""

    def wait(self, longest: int) -> None:
        """An attempt gave no right draft: wait twice as long as after the one before, at most `longest` steps."""
        self.pause = min(longest, 2**self.num_failures - 1)
        self.num_failures = max(self.num_failures, min(self.num_failures + 1, longest.bit_length()))
