"""Drafts of a draft model, which the worker runs behind the model: how many it makes, and what became of them."""

from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import mul

from quire.common.batch import NOTHING_DRAFTED, Ahead, Drafted
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.row_times import RowTimes
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup

_MOST_UNREAD = 64
"""A sequence that went on for more tokens than these without drafts gets no more of them."""
_PASS_RATE = 0.1
_ODDS_RATE = 0.25
_USUAL_ODDS = 0.8
_MOST_OFF = 2.0
"""A pass counts as at most this many times its expectation, and for the rest as an accident or a recording."""


@dataclass(slots=True)
class ModelReading:
    """How far the draft model is with a sequence."""

    num_read: int | None = None
    """How many tokens it has read; None before the sequence's first step, when it has read what is cached."""
    num_tokens: int = 0
    """Those of the sequence when it drafted."""
    drafted: Drafted = NOTHING_DRAFTED
    mean_odds: float = _USUAL_ODDS
    """Of its latest drafts, the newest counted most. While there are none it goes back to what is usual, so that one
    token that was hard to foresee ends them for some steps only."""

    def learn(self, odds: float) -> None:
        """Learn the mean of the newest drafts' odds."""
        self.mean_odds += _ODDS_RATE * (odds - self.mean_odds)

    def forget(self) -> None:
        """No drafts seem worth their time in this step."""
        self.learn(_USUAL_ODDS)


class ModelDrafts:
    """Proposes what the draft model has drafted at the end of the sequence's latest step. That it should do so must be
    said when that step is planned, since it needs slots of the cache: `ahead`."""

    name = "model"

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._most_unread = 0 if config.has_head else _MOST_UNREAD
        self._pass_s = 0.0
        """The seconds of a pass."""

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """See Drafter. Tokens that a grammar has appended since then must be among the drafts."""
        assert seq.drafting is not None
        reading = seq.drafting.reading
        token_ids, odds = reading.drafted
        num_behind = len(seq.token_ids) - reading.num_tokens
        if tuple(seq.token_ids[reading.num_tokens :]) != token_ids[:num_behind]:
            return NO_DRAFT
        return Draft(token_ids[num_behind:][:most], odds[num_behind:][:most])

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """See Drafter."""

    def receive(self, reading: ModelReading, end: int, drafted: Drafted) -> None:
        """The draft model has read a sequence's first `end` tokens, which are computed, and drafted behind the next."""
        reading.num_read, reading.num_tokens, reading.drafted = end, end + 1, drafted
        if drafted.odds:
            reading.learn(sum(drafted.odds) / len(drafted.odds))

    def observe(self, drafting_s: float, num_passes: int) -> None:
        """In a step of decodes the draft model took `drafting_s` for this number of passes."""
        if num_passes:
            pass_s = drafting_s / num_passes
            if self._pass_s:
                pass_s = min(pass_s, _MOST_OFF * self._pass_s)
            self._pass_s += (_PASS_RATE if self._pass_s else 1.0) * (pass_s - self._pass_s)

    def times(self, num_decodes: int, rows: RowTimes) -> list[float]:
        """By number of drafts for each of these sequences, the time of drafting them and of a step with them, in the
        unit of `rows`."""
        counts = range(1 + self._config.num_speculative_tokens)
        pass_time = self._pass_s / rows.pace if rows.pace else 0.0
        return [rows.shape(num_decodes * (1 + count)) + count * pass_time for count in counts]

    def ahead(
        self, seq: Seq, reading: ModelReading, num_tokens: int, num_drafts: int, least_odds: tuple[float, ...]
    ) -> Ahead | None:
        """What it does with a sequence that runs `num_tokens` tokens. With a single one it waits until drafts are
        wanted, and then reads what it has missed. A head waits for nothing: it reads the model's states of the step,
        which are gone then."""
        start = seq.num_computed_tokens
        read = reading.num_read = start if reading.num_read is None else min(reading.num_read, start)
        waits = num_drafts == 0 and num_tokens == 1 and not self._config.has_head
        if waits or start - read > self._most_unread:
            return None
        following = seq.token_ids[start + num_tokens : start + num_tokens + 1]
        return Ahead(num_drafts, tuple(seq.token_ids[read:start]), least_odds, following[0] if following else None)


def best_rate(odds: float, times: list[float]) -> tuple[float, int]:
    """The highest expected number of tokens in a unit of time, and the number of drafts with which it is reached, where
    each draft is right with these odds."""
    worth = accumulate(repeat(odds, len(times) - 1), mul, initial=1.0)
    rates = [tokens / time for tokens, time in zip(accumulate(worth), times, strict=True)]
    return max(zip(rates, range(len(rates)), strict=True), key=lambda found: found[0])


def draft_odds(rate: float, times: list[float]) -> tuple[float, ...]:
    """For each draft, the least probability to be right with which it is worth its time at this rate of tokens. The
    time may grow by steps, so a draft is worth it too where some of those that follow cost little: what counts are the
    slopes below all of the curve (its lower convex hull)."""
    hull = [0]
    for count in range(1, len(times)):
        while len(hull) > 1 and _slope(times, hull[-2], hull[-1]) >= _slope(times, hull[-1], count):
            hull.pop()
        hull.append(count)
    least = list[float]()
    for first, last in pairwise(hull):
        least += [max(0.0, rate * _slope(times, first, last))] * (last - first)
    return tuple(least)


def _slope(times: list[float], first: int, last: int) -> float:
    return (times[last] - times[first]) / (last - first)
