"""How much longer a step takes with more rows, learned while steps run."""

from bisect import bisect_left
from typing import Any

_PACE_RATE = 0.2
_SHAPE_RATE = 0.1
_MOST_OFF = 1.5
"""A step counts as at most this many times its expectation: another program may have had the cores."""
_PRIOR_SLOPE = 0.02
"""What a row adds to the time of a step of one row as long as nothing is known: little, so that drafts are tried."""
_MOST_ROWS = 1024
_FORGET_AFTER = 128
"""Observed steps after which a number of rows that none of them had is forgotten, so that it is tried again."""


class RowTimes:
    """The time of a decode step by its number of rows: a shape that is learned slowly, times a pace that follows the
    machine and the lengths of contexts.

    Few rows read the same weights as one and cost hardly more; with many rows the time grows with each. Where that
    changes, and where the kernels' tiles make steps in it, depends on model, format and machine, so each number of rows
    has its own time. Numbers that were not seen lie on the line between their neighbours.

    Of steps with the same number of rows one after another, only the first says something about the shape: what changes
    after that is the pace. The first observations of a number count more than later ones, and none replaces what its
    neighbours say: a single step tells little.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._shape: list[float] = []
        self._counts: list[int] = []
        self._last_seen: list[int] = []
        self._last_rows = 0
        self.pace = 0.0
        """The seconds of one unit of `shape`, about a step of one row; 0 before the first. `observe` changes it."""
        self._num_steps = 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn that a decode step with this number of rows took this long."""
        if not 0 < num_rows <= _MOST_ROWS or seconds <= 0.0:
            return
        self._num_steps += 1
        expected = self.shape(num_rows)
        self.pace = self.pace or seconds / expected
        ratio = min(_MOST_OFF, max(1.0 / _MOST_OFF, seconds / (self.pace * expected)))
        place = bisect_left(self._rows, num_rows)
        if place == len(self._rows) or self._rows[place] != num_rows:
            for of_rows, value in zip(self._columns, (num_rows, expected, 0, 0), strict=True):
                of_rows.insert(place, value)
        if num_rows != self._last_rows:
            self._counts[place] += 1
            rate = max(_SHAPE_RATE, 1.0 / (1 + self._counts[place]))
            self._shape[place] *= 1.0 + rate * (ratio - 1.0)
        self.pace *= 1.0 + _PACE_RATE * (ratio - 1.0)
        self._last_seen[place], self._last_rows = self._num_steps, num_rows
        if self._num_steps % _FORGET_AFTER == 0:
            self._forget()

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return self._rows, self._shape, self._counts, self._last_seen

    def _forget(self) -> None:
        kept = [place for place, step in enumerate(self._last_seen) if step > self._num_steps - _FORGET_AFTER]
        for of_rows in self._columns:
            of_rows[:] = [of_rows[place] for place in kept]
        unit = self._shape[0] / _prior(self._rows[0])  # shape and pace would move apart, and after weeks be no numbers
        self._shape, self.pace = [value / unit for value in self._shape], unit * self.pace

    def shape(self, num_rows: int) -> float:
        """The time of a step relative to others; only ratios mean something."""
        rows, shape = self._rows, self._shape
        place = bisect_left(rows, num_rows)
        if place < len(rows) and rows[place] == num_rows:
            return shape[place]
        if not rows:
            return _prior(num_rows)
        if place == 0:
            return shape[0] * _prior(num_rows) / _prior(rows[0])
        if place == len(rows):
            slope = (shape[-1] - shape[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.0
            return shape[-1] + max(slope, _PRIOR_SLOPE * shape[0] / _prior(rows[0])) * (num_rows - rows[-1])
        share = (num_rows - rows[place - 1]) / (rows[place] - rows[place - 1])
        return shape[place - 1] + share * (shape[place] - shape[place - 1])


def _prior(num_rows: int) -> float:
    return 1.0 + _PRIOR_SLOPE * (num_rows - 1)
