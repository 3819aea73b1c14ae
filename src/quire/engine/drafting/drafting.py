"""Drafting: proposes drafts for the sequences of a step, and learns how often they are right."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from msgspec.structs import replace

from quire.common.batch import Ahead, Batch, Correction, Drafted
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.common.outputs import DraftStats
from quire.config.args import EngineConfig
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafters import Drafter, make_drafters
from quire.engine.drafting.forced import ForcedTokens
from quire.engine.drafting.lengths import best_lengths, first_lengths, least_odds
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.model_drafts import ModelDrafts, best_rate, draft_odds
from quire.engine.drafting.row_times import RowTimes
from quire.engine.drafting.search_time import SHORTEST_STEP_S, SearchTime
from quire.engine.drafting.trust import Calibration, SequenceDrafts, Trust
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup

Decodes: TypeAlias = Sequence[tuple[SequenceGroup, Seq]]
Seconds: TypeAlias = Callable[[int], float]
Clock: TypeAlias = Callable[[], float]

_LONGEST_PAUSE = 16
"""Steps in which no draft of a sequence is looked for after several were wrong."""
_LONGEST_SEARCH_PAUSE = 4
"""The same after several searches that found nothing worth its time, where time for searches is scarce."""
_EQUAL_STEPS = 8
_MOST_TENANTS = 64
OTHER_TENANTS = "other"
"""All tenants together that had drafts after the first 64 of them."""


class Drafting:
    """Owns the drafters, and what was learned about drafts and about the time of rows.

    Of a sequence it changes `drafting` alone, which it reads again when the step's result is committed. Of each
    sequence the draft is verified that promises most. An exception in here costs the drafts of the step, or only those
    of the drafter that raised it: it is counted, and logged once for each drafter.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        config: SpeculativeConfig,
        max_model_len: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`clock` measures what searches take."""
        self._clock = clock
        self.row_times = RowTimes()
        self.stats = {drafter.name: DraftStats([0] * config.num_speculative_tokens) for drafter in drafters}
        """What was verified, by drafter."""
        self.tenant_stats: dict[str, DraftStats] = {}
        """The same by tenant: of the first ones, and of OTHER_TENANTS."""
        self.num_errors = Counter[str]()
        """Exceptions, by drafter; those in no drafter are counted under an empty name."""
        self.model = next((drafter for drafter in drafters if isinstance(drafter, ModelDrafts)), None)
        """The drafts of a draft model, if there is one."""
        self._drafters = drafters
        self._config = config
        self._max_model_len = max_model_len
        self._search_time = SearchTime(SHORTEST_STEP_S if config.method == "auto" and config.is_adaptive else 0.0)
        self._last_shape = 0, 0
        self._num_equal_steps = 0
        self._seen_rows = set[int]()
        self._calibrations = {drafter.name: Calibration() for drafter in drafters}

    @property
    def may_search(self) -> bool:
        """Whether a search in this step is worth its time; if not, `propose` need not be called."""
        return self.model is not None or self._search_time.is_left

    def propose(self, sequences: Decodes, num_step_tokens: int, most: int, predict: Seconds) -> list[tuple[int, ...]]:
        """For each of these sequences, which draw a token each, the drafts to verify: at most `most` tokens in all,
        beside the `num_step_tokens` that the step runs anyway. `predict` gives the time of a step with prompts."""
        drafts: list[tuple[int, ...]] = [()] * len(sequences)
        start_s = self._clock()
        seeking = [place for place, (_, seq) in enumerate(sequences) if not self._pauses(seq)]
        if seeking:
            with self._contained():
                sought = [sequences[place] for place in seeking]
                found = self._choose(sought, len(sequences), num_step_tokens, most, predict)
                for place, token_ids in zip(seeking, found, strict=True):
                    drafts[place] = token_ids
        if self._config.is_adaptive:
            self._search_time.spend(self._clock() - start_s, len(seeking))
        return drafts

    def observe(self, group: SequenceGroup, seq: Seq, num_drafts: int, num_accepted: int) -> None:
        """Of this number of drafts of a sequence, the first `num_accepted` were right, and the next was not."""
        with self._contained():
            if (known := seq.drafting) is None:
                return
            self.stats[known.drafter].add(num_drafts, num_accepted)
            self._stats_of(group.tenant).add(num_drafts, num_accepted)
            calibration, odds = self._calibrations[known.drafter], known.odds[:num_drafts]
            known.trust[known.drafter].observe([calibration.correction.of(stated) for stated in odds], num_accepted)
            calibration.observe(odds, num_accepted)
            if num_accepted:
                known.num_failures = 0
                self._search_time.observe_accepted(num_accepted)
            else:
                known.wait(_LONGEST_PAUSE)

    def ahead(self, scheduled: Sequence[tuple[SequenceGroup, Seq, int, int, bool]]) -> dict[int, Ahead]:
        """By sequence id, what the draft model does in this step. Of each sequence the numbers of its tokens and drafts
        in the step are given, and whether it may take drafts in the next."""
        planned, model, config = dict[int, Ahead](), self.model, self._config
        with self._contained(ModelDrafts.name):
            assert model is not None, "there is nothing ahead without a draft model"
            times = model.times(sum([takes for *_, takes in scheduled]), self.row_times)
            for group, seq, num_tokens, num_drafts, takes in scheduled:
                known, count = self._known(seq), config.num_speculative_tokens if takes else 0
                least: tuple[float, ...] = ()
                correction = self._correction(known, model.name)
                if count and config.is_adaptive:
                    rate, best = best_rate(correction.of(known.reading.mean_odds), times)
                    if best:  # a sequence whose drafts are surer than others' may have more than these
                        count, least = min(count, 2 * best + 1), draft_odds(rate, times)
                    else:
                        count = 0
                        known.reading.forget()
                count = max(0, min(count, self._num_left(group, seq) - 2))
                ahead = model.ahead(seq, known.reading, num_tokens, count, least)
                if ahead is not None:  # where all drafts of the step are accepted, fewer tokens are left
                    now = max(0, min(count, self._num_left(group, seq) - num_drafts - 2))
                    planned[seq.seq_id] = replace(ahead, num_drafts=now, num_more=count - now, correction=correction)
        return planned

    def receive(self, seq: Seq, end: int, drafted: Drafted) -> None:
        """The draft model has read the sequence's first `end` tokens, and drafted behind the next."""
        assert self.model is not None, "nothing is received without a draft model"
        self.model.receive(self._known(seq).reading, end, drafted)

    def observe_step(self, batch: Batch, seconds: float, drafting_s: float = 0.0, num_passes: int = 0) -> None:
        """A step took this long, without the draft model, which made this number of passes.

        Only decodes alone say how long rows take. Of short steps that follow one of the same
        shape, one in several is looked at: that takes microseconds, and steps of small models not many more.
        """
        shape, self._num_equal_steps = (len(batch.sequences), batch.num_tokens), self._num_equal_steps + 1
        is_short = seconds < SHORTEST_STEP_S
        if is_short and shape == self._last_shape and self._num_equal_steps < _EQUAL_STEPS:
            return
        with self._contained():
            self._search_time.observe_steps(seconds, self._num_equal_steps, len(batch.sequences))
            self._last_shape, self._num_equal_steps = shape, 0
            if all(s.drawn is not None and len(s.token_ids) == s.drawn.num_rows for s in batch.sequences):
                if batch.num_tokens in self._seen_rows:
                    self.row_times.observe(batch.num_tokens, seconds)
                    if self.model is not None:
                        self.model.observe(drafting_s, num_passes)
                self._seen_rows.add(batch.num_tokens)  # the first step with a number of rows takes longer

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """A sequence has ended."""
        for drafter in self._drafters:
            with self._contained(drafter.name):
                drafter.finish(group, seq)

    def _stats_of(self, tenant: str) -> DraftStats:
        by_tenant = self.tenant_stats
        name = tenant if tenant in by_tenant or len(by_tenant) < _MOST_TENANTS else OTHER_TENANTS
        return by_tenant.setdefault(name, DraftStats([0] * self._config.num_speculative_tokens))

    @contextmanager
    def _contained(self, name: str = "") -> Iterator[None]:
        """Where an exception costs drafts and nothing else."""
        try:
            yield
        except Exception:
            self.num_errors[name] += 1
            if self.num_errors[name] == 1:
                logger.exception("drafting failed%s: drafts are lost, and no token", f" ({name})" if name else "")

    def _pauses(self, seq: Seq) -> bool:
        """Whether no draft of the sequence is looked for in this step."""
        known = seq.drafting
        if known is None or known.pause == 0 or not self._config.is_adaptive:
            return False
        if self.model is not None or (seq.grammar is not None and ForcedTokens.name in self._calibrations):
            return False  # one does not look for drafts without reason, the other forces tokens now and then
        known.pause -= 1
        return True

    def _choose(
        self, sequences: Decodes, num_decodes: int, num_step_tokens: int, most: int, predict: Seconds
    ) -> list[tuple[int, ...]]:
        """The drafts to verify of the sequences that do not pause, which are some of the step's `num_decodes`."""
        for calibration in self._calibrations.values():
            calibration.update()
        if not self._config.is_adaptive:
            drafts = [self._draft(group, seq, 0.0) for group, seq in sequences]
            lengths = first_lengths([len(draft.token_ids) for draft in drafts], most)
        else:
            seconds = self._seconds(num_decodes, num_step_tokens, predict)
            if seconds(0) <= 0.0:  # nothing is known yet
                return [()] * len(sequences)
            needed = least_odds(num_decodes, len(sequences), seconds)
            drafts = [self._draft(group, seq, needed) for group, seq in sequences]
            odds = [draft.odds for draft in drafts]
            num_rows = num_step_tokens if num_decodes == num_step_tokens else None
            lengths = best_lengths(odds, num_decodes, seconds, most, num_rows)
        for (_, seq), length in zip(sequences, lengths, strict=True):
            if not length and seq.drafting is not None and self._search_time.is_scarce(num_decodes):
                seq.drafting.wait(_LONGEST_SEARCH_PAUSE)
        return [draft.token_ids[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def _seconds(self, num_decodes: int, num_step_tokens: int, predict: Seconds) -> Seconds:
        """The time of the step by its number of drafts. Only ratios mean something. The time that prompts of the step
        take is left out: else drafts would seem cheap beside it that cost more than a token of a step of decodes."""
        shape, pace = self.row_times.shape, self.row_times.pace
        if num_decodes == num_step_tokens:
            return lambda n: shape(num_step_tokens + n)
        prompts_s = predict(num_step_tokens) - pace * shape(num_decodes) if pace else 0.0
        return lambda n: predict(num_step_tokens + n) - prompts_s

    def _draft(self, group: SequenceGroup, seq: Seq, needed: float) -> Draft:
        """The draft that promises most; none of drafters that would have to be more reliable than they are."""
        known = self._known(seq)
        best, most = NO_DRAFT, min(self._config.num_speculative_tokens, self._num_left(group, seq) - 1)
        for drafter in self._drafters if most > 0 else ():
            known.trust[drafter.name].decay()
            correction = self._correction(known, drafter.name)
            if correction.of(1.0) <= needed and self._config.is_adaptive:
                continue
            with self._contained(drafter.name):
                fault_point("draft.propose", seq.seq_id)
                found = drafter.propose(group, seq, most)
                if seq.grammar is not None and found.token_ids:
                    found = found.first(seq.grammar.num_allowed(found.token_ids))
                scaled = Draft(found.token_ids, tuple([correction.of(odds) for odds in found.odds]))
                if scaled.expected_tokens > best.expected_tokens:
                    best, known.drafter, known.odds = scaled, drafter.name, found.odds
        return best

    def _correction(self, known: SequenceDrafts, name: str) -> Correction:
        """Of the odds of a drafter for one sequence."""
        return self._calibrations[name].correction._replace(trust=known.trust[name].factor)

    def _known(self, seq: Seq) -> SequenceDrafts:
        if seq.drafting is None:
            seq.drafting = SequenceDrafts({name: Trust() for name in self._calibrations})
        return seq.drafting

    def _num_left(self, group: SequenceGroup, seq: Seq) -> int:
        """How many more tokens the sequence may have."""
        num_tokens, max_tokens = len(seq.token_ids), group.params.max_tokens
        left = self._max_model_len - num_tokens
        return left if max_tokens is None else min(left, seq.num_prompt_tokens + max_tokens - num_tokens)


def make_drafting(config: EngineConfig) -> Drafting | None:
    """What proposes an engine's drafts; None if nothing does, or the model draws no tokens."""
    drafters = make_drafters(config.speculative) if config.model.runner == "generate" else ()
    return Drafting(drafters, config.speculative, config.model.max_model_len) if drafters else None
