"""Drafting: proposes drafts for the sequences of a step, and learns how often they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from quire.common.batch import Ahead, Batch, Drafted
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafters import Drafter
from quire.engine.drafting.forced import Walk
from quire.engine.drafting.lengths import best_lengths
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.model_drafts import ModelDrafts, ModelReading, best_count
from quire.engine.drafting.row_times import RowTimes
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup

Decodes: TypeAlias = Sequence[tuple[SequenceGroup, Seq]]
Seconds: TypeAlias = Callable[[int], float]

_PRIOR = 2.0
"""How many tested drafts the expectation before the first test counts as."""
_DECAY = 0.98
"""Of what was learned about a sequence, in each step: after some 50 steps without a draft, one is tried again."""
_DECAY_OF_ALL = 0.995
_LONGEST_PAUSE = 16
"""Steps in which no draft of a sequence is looked for after several were wrong; a quarter if none was found."""


class Trust:
    """How often drafts of one drafter are right, relative to their odds."""

    __slots__ = ("accepted", "expected")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.expected = 0.0

    def factor(self, prior: float) -> float:
        """What to multiply odds by."""
        return min(1.0, (self.accepted + _PRIOR * prior) / (self.expected + _PRIOR))

    def observe(self, odds: Sequence[float], num_accepted: int) -> None:
        """`num_accepted` drafts were right, and the next one, if there is one, was wrong."""
        self.accepted += num_accepted
        self.expected += sum(odds[: num_accepted + 1])

    def decay(self, factor: float) -> None:
        """Let what was learned count less."""
        self.accepted *= factor
        self.expected *= factor


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
    walk: Walk | None = None
    """The latest one through the grammar."""

    def wait(self, longest: int) -> None:
        """An attempt gave no right draft: wait twice as long as after the one before."""
        self.pause = min(longest, 2**self.num_failures - 1)
        self.num_failures = min(self.num_failures + 1, 10)


class DraftStats:
    """Counts of all drafts that were verified."""

    def __init__(self, most: int) -> None:
        self.num_drafts = 0
        """How often drafts of a sequence were verified."""
        self.num_tokens = 0
        self.num_accepted = 0
        self.num_accepted_at = [0] * most
        """By position among the drafts of a sequence."""

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Of this number of drafts of a sequence, the first `num_accepted` were right."""
        self.num_drafts += 1
        self.num_tokens += num_drafts
        self.num_accepted += num_accepted
        for position in range(num_accepted):
            self.num_accepted_at[position] += 1


class Drafting:
    """Owns the drafters, and what was learned about drafts and about the time of rows. Of a sequence it changes
    `drafting` alone, which it reads again when the step's result is committed. Of each sequence the draft is verified
    that promises most.
    """

    def __init__(self, drafters: Sequence[Drafter], config: SpeculativeConfig, max_model_len: int) -> None:
        self.row_times = RowTimes()
        self.stats = DraftStats(config.num_speculative_tokens)
        self.model = next((drafter for drafter in drafters if isinstance(drafter, ModelDrafts)), None)
        """The drafts of a draft model, if there is one."""
        self._drafters = drafters
        self._config = config
        self._max_model_len = max_model_len
        self._seen_shapes = set[tuple[int, int]]()
        self._trust = {drafter.name: Trust() for drafter in drafters}

    def propose(self, sequences: Decodes, num_step_tokens: int, most: int, predict: Seconds) -> list[tuple[int, ...]]:
        """For each of these sequences, which draw a token each, the drafts to verify: at most `most` tokens in all,
        beside the `num_step_tokens` that the step runs anyway. `predict` gives the time of a step with prompts."""
        seconds = self._seconds(len(sequences), num_step_tokens, predict)
        if self._config.is_adaptive and seconds(0) <= 0.0:  # nothing is known yet
            return [()] * len(sequences)
        needed = _least_odds(len(sequences), seconds) if self._config.is_adaptive else 0.0
        drafts = [self._draft(group, seq, needed) for group, seq in sequences]
        if self._config.is_adaptive:
            lengths = best_lengths([draft.odds for draft in drafts], float(len(sequences)), seconds, most)
        else:
            lengths = _first_lengths([len(draft.token_ids) for draft in drafts], most)
        return [draft.token_ids[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def observe(self, seq: Seq, num_drafts: int, num_accepted: int) -> None:
        """Of this number of drafts of a sequence, the first `num_accepted` were right, and the next was not."""
        known = seq.drafting
        self.stats.add(num_drafts, num_accepted)
        if known is not None:
            for trust in (known.trust[known.drafter], self._trust[known.drafter]):
                trust.observe(known.odds[:num_drafts], num_accepted)
            if num_accepted:
                known.num_failures = 0
            else:
                known.wait(_LONGEST_PAUSE)
            self._trust[known.drafter].decay(_DECAY_OF_ALL)

    def ahead(self, scheduled: Sequence[tuple[SequenceGroup, Seq, int, bool]]) -> dict[int, Ahead]:
        """By sequence id, what the draft model does with those that run this number of tokens, and perhaps take drafts
        in the next step."""
        planned, model, config = dict[int, Ahead](), self.model, self._config
        if model is None:
            return planned
        times = model.times(sum([takes for _, _, _, takes in scheduled]), self.row_times)
        least_odds = max(0.0, times[1] / times[0] - 1.0) if config.is_adaptive else 0.0
        for group, seq, num_tokens, takes in scheduled:
            known, count = self._known(seq), config.num_speculative_tokens if takes else 0
            if count and config.is_adaptive:
                factor = known.trust[model.name].factor(self._trust[model.name].factor(1.0))
                count = 0 if known.pause > 0 else best_count(factor * known.reading.mean_odds, times)
            count = max(0, min(count, self._num_left(group, seq) - 2))  # behind a token that may be the last but one
            if (ahead := model.ahead(seq, known.reading, num_tokens, count, least_odds)) is not None:
                planned[seq.seq_id] = ahead
        return planned

    def receive(self, seq: Seq, end: int, drafted: Drafted) -> None:
        """The draft model has read the sequence's first `end` tokens, and drafted behind the next."""
        if self.model is not None:
            self.model.receive(self._known(seq).reading, end, drafted)

    def observe_step(self, batch: Batch, seconds: float, drafting_s: float = 0.0) -> None:
        """A step took this long, and beside it the draft model. Only those of decodes alone say how long rows take."""
        if all(s.drawn is not None and len(s.token_ids) == s.drawn.num_rows for s in batch.sequences):
            shape = len(batch.sequences), batch.num_tokens
            if shape in self._seen_shapes:
                self.row_times.observe(batch.num_tokens, seconds)
                if self.model is not None:
                    self.model.observe(batch, drafting_s, seconds, self.row_times)
            self._seen_shapes.add(shape)  # the first step of a shape is recorded, which takes longer

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """A sequence has ended."""
        for drafter in self._drafters:
            drafter.finish(group, seq)

    def _seconds(self, num_decodes: int, num_step_tokens: int, predict: Seconds) -> Seconds:
        """The time of the step by its number of drafts. Only ratios mean something."""
        of_rows = self.row_times.shape if num_decodes == num_step_tokens else predict
        return lambda n: of_rows(num_step_tokens + n)

    def _draft(self, group: SequenceGroup, seq: Seq, needed: float) -> Draft:
        """The draft that promises most; none of drafters that would have to be more reliable than they are."""
        known, config = self._known(seq), self._config
        if known.pause > 0 and config.is_adaptive and seq.grammar is None:  # a grammar forces tokens now and then
            known.pause -= 1
            return NO_DRAFT
        best, most = NO_DRAFT, min(config.num_speculative_tokens, self._num_left(group, seq) - 1)
        for drafter in self._drafters if most > 0 else ():
            trust = known.trust[drafter.name]
            trust.decay(_DECAY)
            factor = trust.factor(self._trust[drafter.name].factor(1.0))
            if factor <= needed and config.is_adaptive:
                continue
            try:
                fault_point("draft.propose", seq.seq_id)
                found = drafter.propose(group, seq, most)
            except Exception:
                logger.exception("request %s: the drafter %r failed", group.request_id, drafter.name)
                continue
            scaled = Draft(found.token_ids, tuple([factor * odds for odds in found.odds]))
            if scaled.expected_tokens > best.expected_tokens:
                best, known.drafter, known.odds = scaled, drafter.name, found.odds
        if not best.token_ids:
            known.wait(_LONGEST_PAUSE // 4)
        return best

    def _known(self, seq: Seq) -> SequenceDrafts:
        if seq.drafting is None:
            seq.drafting = SequenceDrafts({name: Trust() for name in self._trust})
        return seq.drafting

    def _num_left(self, group: SequenceGroup, seq: Seq) -> int:
        """How many more tokens the sequence may have."""
        num_tokens, max_tokens = len(seq.token_ids), group.params.max_tokens
        left = self._max_model_len - num_tokens
        return left if max_tokens is None else min(left, seq.num_prompt_tokens + max_tokens - num_tokens)


def _least_odds(num_decodes: int, seconds: Seconds) -> float:
    """The probability that a draft must have at least to make tokens cheaper, alone or together with one of each other
    sequence: a step that has one more row may be no longer, and the next one be."""
    alone = seconds(0)
    return max(0.0, min(num_decodes * (seconds(n) / alone - 1.0) / n for n in (1, num_decodes)))


def _first_lengths(given: Sequence[int], most: int) -> list[int]:
    lengths = list[int]()
    for length in given:
        lengths.append(min(length, most))
        most -= lengths[-1]
    return lengths
