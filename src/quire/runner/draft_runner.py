"""A draft model: reads what the model's steps accept, and drafts what may come next (Leviathan et al. 2023)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from quire import kernels
from quire.common.batch import (
    Ahead,
    Drafted,
    Draw,
    DrawnRows,
    ScheduledSequence,
    StepResult,
    TokenIds,
    accepted_drafts,
)
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.models.layers.batch_tensors import LayerCache
from quire.runner.decode_graphs import MAX_ROWS, DecodeGraphs, Recordable
from quire.runner.model_runner import build_tensors
from quire.runner.sampling.sampler import Sampler

Announce = Callable[[tuple[ScheduledSequence, ...], list[int], bool], object]
"""Called before a pass with its sequences, with the rows of hidden states that a head reads, and with whether these
are the model's."""
_LONGEST_RECORDED = 40
"""Tokens of a sequence in a pass that is recorded: those of a step with the most drafts, and some more."""


@dataclass(slots=True)
class Reading:
    """A sequence that the draft model reads, and what it has drafted for it."""

    place: int
    sequence: ScheduledSequence
    """The tokens of the next pass; `drawn` is the last row, or None if nothing is drafted."""
    ahead: Ahead
    row: int
    """The first of its rows in the model's step, or later its place among those that drew in the pass before."""
    token_ids: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    probability: float = 1.0

    def take(self, token_id: int, odds: float) -> bool:
        """Draft a token. Returns whether another one is wanted."""
        self.token_ids.append(token_id)
        self.odds.append(odds)
        self.probability *= self.ahead.correction.of(odds)
        drawn, end = self.sequence.drawn, self.sequence.end
        assert drawn is not None
        history = None if drawn.history is None else _longer(drawn.history, token_id)
        self.sequence = replace(self.sequence, token_ids=(token_id,), start=end, drawn=replace(drawn, history=history))
        count, least = len(self.token_ids), self.ahead.least_odds
        return count < self.ahead.num_drafts and (count >= len(least) or self.probability >= least[count])


class Passes:
    """Passes of what drafts: recorded where they are short."""

    def __init__(
        self,
        model: Recordable,
        kv: Sequence[LayerCache],
        block_size: int,
        max_len: int,
        backend: kernels.Backend,
        workspace: kernels.Workspace,
    ) -> None:
        """`max_len` is that of the model that is drafted for."""
        self._model, self._kv, self._block_size, self._workspace = model, kv, block_size, workspace
        self._graphs = DecodeGraphs(model, kv, block_size, -(-max_len // block_size), backend, workspace)
        self._can_record = backend.can_record and model.can_record

    def logits(self, sequences: Sequence[ScheduledSequence]) -> Tensor | None:
        """[num_drawn, vocab] float32, valid until the next pass: of the last row of each sequence that draws; None if
        none does."""
        lens = [len(s.token_ids) for s in sequences]
        with self._workspace:
            if self._can_record and max(lens) <= _LONGEST_RECORDED and sum(lens) <= MAX_ROWS:
                return self._graphs.logits(sequences)
            tensors = build_tensors(sequences, self._block_size, narrows=self._model.can_narrow)
            hidden, rows = self._model(tensors, self._kv), tensors.of_hidden.logit_rows
            return self._model.compute_logits(kernels.embedding(rows, hidden)) if len(rows) else None


class DraftRunner:
    """Owns the draft model and its layers' caches, which lie in the blocks of the model's: what the batches say of
    blocks and tables holds for both. After a step it keeps nothing of it.

    A draft is the token that seems likeliest to it after the request's penalties and bans, also where the model draws
    at random: that is right more often than a token drawn with the same random number (ADR 0057). It knows no grammars
    and no adapters.
    """

    def __init__(self, passes: Passes, *, vocab_sizes: tuple[int, int], max_len: int, backend: kernels.Backend) -> None:
        """The vocabulary sizes are the draft model's and the model's; `max_len` is the draft model's longest
        sequence."""
        self._passes, self._vocab_sizes, self._max_len = passes, vocab_sizes, max_len
        self._sampler = Sampler(backend)
        self._has_failed = False
        self.announce: Announce | None = None
        self.when_failed: Callable[[], object] | None = None
        """Called after a failure: other ranks may still be in the pass that was announced."""

    @torch.inference_mode()
    def run(self, sequences: Sequence[ScheduledSequence], result: StepResult) -> StepResult:
        """The result of the model's step, and the drafts behind it. A failure costs the drafts alone, and is logged if
        it is the first."""
        start_s, has_lost_drafts = time.monotonic(), False
        readings = list[Reading]()
        try:
            fault_point("draft.model")
            going_on = readings = self._readings(sequences, result)
            while going_on:
                going_on = self._pass(going_on)
        except Exception:
            if not self._has_failed:
                logger.exception("the draft model failed: this step makes no drafts")
            self._has_failed = has_lost_drafts = True
            readings = []
            if self.when_failed is not None:
                self.when_failed()
        drafted = {r.place: Drafted(tuple(r.token_ids), tuple(r.odds)) for r in readings}
        drafting_s = time.monotonic() - start_s
        return replace(result, drafted=drafted, drafting_s=drafting_s, has_lost_drafts=has_lost_drafts)

    def _readings(self, sequences: Sequence[ScheduledSequence], result: StepResult) -> list[Reading]:
        counts = [0 if s.drawn is None else len(s.drawn.draws) * s.drawn.num_rows for s in sequences]
        rows = accumulate([len(s.token_ids) for s in sequences], initial=0)
        readings = list[Reading]()
        for place, (s, count, end, row) in enumerate(zip(sequences, counts, accumulate(counts), rows, strict=False)):
            has_failed = result.errors and not result.errors.keys().isdisjoint(range(end - count, end))
            if s.ahead is not None and s.end + s.ahead.num_drafts <= self._max_len and not has_failed:
                drawn_ids = result.token_ids[end - count : end]
                ahead = with_room_of_rejected(s, s.ahead, drawn_ids)
                to_read = self._to_read(s, ahead, drawn_ids)
                if to_read.token_ids:
                    readings.append(Reading(place, to_read, ahead, row))
        return readings

    def _to_read(self, s: ScheduledSequence, ahead: Ahead, drawn_ids: tuple[int, ...]) -> ScheduledSequence:
        """The tokens that it has missed, those that the step accepts, and if it drafts, the one drawn behind them."""
        token_ids, drawn = ahead.unread + s.token_ids, None
        if s.drawn is not None and ahead.num_drafts:
            accepted, history = accepted_tokens(s, drawn_ids)
            token_ids = ahead.unread + accepted
            drawn = drawn_as_draft(s.drawn, history, self._vocab_sizes[0])
        if self._vocab_sizes[0] < self._vocab_sizes[1]:  # numbers without a token that a caller may give
            token_ids = tuple([token_id if token_id < self._vocab_sizes[0] else 0 for token_id in token_ids])
        return ScheduledSequence(s.seq_id, token_ids, s.start - len(ahead.unread), s.block_tables, drawn)

    def _pass(self, readings: list[Reading]) -> list[Reading]:
        """Read, and draft a token for each sequence that wants one. Returns those that want another."""
        sequences = [reading.sequence for reading in readings]
        logits = self._logits(readings)
        if logits is None:
            return []
        drawn, vocab_size = self._sampler.sample(logits, sequences), self._vocab_sizes[1]
        going_on = list[Reading]()
        drafting = [reading for reading in readings if reading.sequence.drawn is not None]
        for row, (reading, token_id) in enumerate(zip(drafting, drawn.token_ids, strict=True)):
            reading.row, odds = row, float(np.exp(drawn.logprobs[row].logprobs[0, 0]))
            is_usable = row not in drawn.errors and token_id < vocab_size and odds > 0.0  # odds may be no number
            if is_usable and reading.take(token_id, odds):
                going_on.append(reading)
        return going_on

    def _logits(self, readings: Sequence[Reading]) -> Tensor | None:
        """[num_drawn, vocab] float32: of the last row of each sequence that draws; None if none does."""
        return self._logits_of([reading.sequence for reading in readings], [], is_first=True)

    def _logits_of(
        self, sequences: Sequence[ScheduledSequence], rows: Sequence[int], *, is_first: bool
    ) -> Tensor | None:
        if self.announce is not None:
            self.announce(tuple(sequences), list(rows), is_first)
        return self._passes.logits(sequences)

    @torch.inference_mode()
    def follow(self, sequences: Sequence[ScheduledSequence], rows: Sequence[int], *, is_first: bool) -> None:
        """Run a pass that another rank has announced."""
        self._logits_of(sequences, rows, is_first=is_first)


def with_room_of_rejected(s: ScheduledSequence, ahead: Ahead, drawn_ids: tuple[int, ...]) -> Ahead:
    """The same, now that it is known how many drafts of the step are rejected."""
    if s.drawn is None or not ahead.num_more:
        return ahead
    num_rejected = s.num_drafts - len(accepted_drafts(s, drawn_ids))
    return replace(ahead, num_drafts=ahead.num_drafts + min(ahead.num_more, num_rejected))


def accepted_tokens(s: ScheduledSequence, drawn_ids: tuple[int, ...]) -> tuple[tuple[int, ...], TokenIds | None]:
    """Of a sequence that draws: its tokens in the step as far as they are accepted and the one drawn behind them, and
    its history up to there if the draw has one."""
    assert s.drawn is not None
    num_accepted, history = len(accepted_drafts(s, drawn_ids)), s.drawn.history
    num_rejected, newest = s.num_drafts - num_accepted, drawn_ids[num_accepted]
    if history is not None:
        history = _longer(history[: len(history) - num_rejected], newest)
    return (*s.token_ids[: len(s.token_ids) - num_rejected], newest), history


def drawn_as_draft(drawn: DrawnRows, history: TokenIds | None, vocab_size: int) -> DrawnRows:
    """The last row, of which the likeliest token is drawn, as `_as_draft` says. Tokens that a smaller vocabulary does
    not have are left out of the history."""
    (draw,), num_prompt_tokens = drawn.draws, drawn.num_prompt_tokens
    if history is not None and history.max(initial=0) >= vocab_size:
        num_prompt_tokens = int(np.count_nonzero(history[:num_prompt_tokens] < vocab_size))
        history = history[history < vocab_size]
    return DrawnRows((_as_draft(draw, vocab_size),), num_prompt_tokens, 1, history)


def _longer(history: TokenIds, token_id: int) -> TokenIds:
    return np.append(history, np.int32(token_id))


@lru_cache(maxsize=1024)
def _as_draft(draw: Draw, vocab_size: int) -> Draw:
    """The draw of the likeliest token, with its probability, as far as it is about tokens below `vocab_size`."""
    allowed = draw.allowed_token_ids
    return replace(
        draw,
        temperature=0.0,
        logprobs=0,
        logprobs_mode="raw_logprobs",
        processors=(),
        logit_bias=tuple([(token_id, bias) for token_id, bias in draw.logit_bias if token_id < vocab_size]),
        allowed_token_ids=allowed and (tuple([token_id for token_id in allowed if token_id < vocab_size]) or None),
        bad_words=tuple([word for word in draw.bad_words if max(word) < vocab_size]),
        stop_token_ids=tuple([token_id for token_id in draw.stop_token_ids if token_id < vocab_size]),
    )
