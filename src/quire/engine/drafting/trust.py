"""How often drafts are right, by drafter, in general and of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.common.batch import Correction
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


_NUM_RANGES = 8
_RANGE_PRIOR = 4.0
"""How many tested drafts of a range the correction of all ranges counts as."""


class Trust:
    """How often drafts of one drafter are right in one sequence, relative to what is expected of its drafts."""

    __slots__ = ("accepted", "expected")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.expected = 0.0

    @property
    def factor(self) -> float:
        """What to multiply odds by."""
        return _factor(self.accepted, self.expected)

    def observe(self, odds: Sequence[float], num_accepted: int) -> None:
        """`num_accepted` drafts were right, and the next one, if there is one, was wrong."""
        self.accepted += num_accepted
        self.expected += sum(odds[: num_accepted + 1])

    def decay(self) -> None:
        """Let what was learned count less."""
        self.accepted *= _DECAY
        self.expected *= _DECAY


class Calibration:
    """How often drafts of one drafter are right in all sequences, by the odds that it states.

    All odds are corrected by a factor, and each range of them by what is left then: a greedy request nearly always has
    the token that a draft model gives odds of 0.6, and those that it gives 0.3 may be as wrong as they say.
    """

    def __init__(self) -> None:
        self.correction = Correction()
        """Of the odds of any sequence, as of the latest `update`."""
        self._tested = [0.0] * _NUM_RANGES
        self._accepted = [0.0] * _NUM_RANGES
        self._stated = [0.0] * _NUM_RANGES

    def observe(self, odds: Sequence[float], num_accepted: int) -> None:
        """`num_accepted` drafts were right, and the next one, if there is one, was wrong."""
        for place, stated in enumerate(odds[: num_accepted + 1]):
            index = min(int(stated * _NUM_RANGES), _NUM_RANGES - 1)
            self._tested[index] += 1.0
            self._accepted[index] += place < num_accepted
            self._stated[index] += stated

    def update(self) -> None:
        """Make the correction of what was observed, and let that count less."""
        factor = _factor(sum(self._accepted), sum(self._stated))
        columns = zip(self._tested, self._accepted, self._stated, strict=True)
        shifts = [(accepted - factor * stated) / (tested + _RANGE_PRIOR) for tested, accepted, stated in columns]
        self.correction = Correction(factor, tuple(shifts))
        for column in (self._tested, self._accepted, self._stated):
            column[:] = [_DECAY_FOR_ALL * value for value in column]


def _factor(accepted: float, expected: float) -> float:
    return min(_MOST_TRUST, (accepted + _PRIOR) / (expected + _PRIOR))


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
