"""How the tokens of a step are drawn, in the kernels' form: what the draws say once, and what each step adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.common.batch import Draw, MaskWords, ScheduledSequence, TokenIds
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.common.params import LogprobsMode
from quire.kernels import LogitChanges, SamplingTensors, TokenLists
from quire.runner.sampling.random import uniform


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A row of logits that a token is drawn from, as its sequence describes it."""

    seq_id: int
    position: int
    """Number of tokens so far, and so the position of the drawn token."""
    num_prompt_tokens: int
    all_history: TokenIds | None
    """The sequence's tokens, of which the first `position` are this row's; None where no draw needs them."""
    mask: MaskWords | None

    @property
    def history(self) -> TokenIds:
        """[position]: the tokens so far."""
        assert self.all_history is not None, f"sequence {self.seq_id} is scheduled without the history its draw needs"
        return self.all_history[: self.position]


def draw_rows(sequences: Sequence[ScheduledSequence]) -> list[DrawRow]:
    """One for each draw, in the order of StepResult.token_ids."""
    return [
        DrawRow(s.seq_id, position, drawn.num_prompt_tokens, drawn.history, drawn.masks[i] if drawn.masks else None)
        for s in sequences
        if (drawn := s.drawn) is not None
        for i, position in enumerate(range(s.end - drawn.num_rows + 1, s.end + 1))
        for _ in drawn.draws
    ]


def draws_of(sequences: Sequence[ScheduledSequence]) -> tuple[Draw, ...]:
    """The draws of a step, in the order of StepResult.token_ids."""
    return tuple([draw for s in sequences if s.drawn is not None for draw in s.drawn.draws * s.drawn.num_rows])


def _positions(sequences: Sequence[ScheduledSequence]) -> list[int]:
    """The position of each drawn token."""
    return [
        position
        for s in sequences
        if s.drawn is not None
        for position in range(s.end - s.drawn.num_rows + 1, s.end + 1)
        for _ in s.drawn.draws
    ]


class DrawTensors:
    """The draws of a step, one for each row of logits. Built again only when the draws or their order change."""

    def __init__(self, draws: tuple[Draw, ...], vocab: int) -> None:
        self.draws = draws
        self.vocab = vocab
        self.logprob_rows = _rows_by_wish(draws)
        """By number of likeliest tokens and the draw's logprobs_mode, the rows [count] int64 that want these."""
        self.processed_rows = [row for row, draw in enumerate(draws) if draw.processors]
        self._cuts = (
            torch.tensor([d.temperature for d in draws], dtype=torch.float64),
            torch.tensor([d.top_k for d in draws], dtype=torch.int64),
            torch.tensor([d.top_p for d in draws], dtype=torch.float64),
            torch.tensor([d.min_p for d in draws], dtype=torch.float64),
        )
        self._keys = [d.random_key if d.temperature > 0 else None for d in draws]
        is_certain = all(key is None for key in self._keys)
        self._no_luck = torch.zeros(len(draws), dtype=torch.float64) if is_certain else None
        self._banning = {row: _Banning.of(d) for row, d in enumerate(draws) if d.bad_words or d.min_tokens}
        words = {ids: _allowed_words(ids, vocab) for ids in {d.allowed_token_ids for d in draws} if ids is not None}
        self._allowed = [None if d.allowed_token_ids is None else words[d.allowed_token_ids] for d in draws]
        self._penalized = [row for row, draw in enumerate(draws) if _is_penalized(draw)]
        self._words: MaskWords | None = None
        self._is_changed = bool(self._penalized or words or any(d.logit_bias for d in draws))

    def at(self, sequences: Sequence[ScheduledSequence], errors: dict[int, str]) -> SamplingTensors:
        """For the next tokens of these sequences, whose draws these are. What fails in a row is reported in `errors`,
        and the token drawn there means nothing."""
        luck, changes = self._no_luck, None
        if luck is None:
            at = zip(self._keys, _positions(sequences), strict=True)
            luck = torch.tensor([0.0 if k is None else uniform(k, i) for k, i in at], dtype=torch.float64)
        if self._is_changed or self._banning or any(s.drawn is not None and s.drawn.masks for s in sequences):
            changes = self._changes(draw_rows(sequences), errors)
        return SamplingTensors(*self._cuts, luck, changes)

    def fill_allowed(self, index: int, row: DrawRow, words: MaskWords) -> bool:
        """The tokens that a row may draw by its grammar and `allowed_token_ids`; by the grammar alone where they have
        no token in common. False, and nothing is written, if it may draw any."""
        allowed = self._allowed[index]
        if row.mask is not None:
            words[:] = row.mask
            if allowed is not None and (both := words & allowed).any():
                words[:] = both
        elif allowed is not None:
            words[:] = allowed
        return row.mask is not None or allowed is not None

    def banned(self, index: int, row: DrawRow) -> list[int]:
        """Tokens that would end a row's output too early, or complete one of its bad words."""
        banning = self._banning.get(index)
        return [] if banning is None else banning.token_ids(row)

    @cached_property
    def _biases(self) -> tuple[TokenLists, Tensor]:
        biases = [d.logit_bias for d in self.draws]
        values = [value for bias in biases for _, value in bias]
        return _token_lists([[i for i, _ in bias] for bias in biases]), torch.tensor(values, dtype=torch.float32)

    @cached_property
    def _penalties(self) -> Tensor:
        penalties = [(d.repetition_penalty, d.frequency_penalty, d.presence_penalty) for d in self.draws]
        return torch.tensor(penalties, dtype=torch.float32)

    def _changes(self, rows: list[DrawRow], errors: dict[int, str]) -> LogitChanges | None:
        masks, mask_of, banned = self._forbidden(rows, errors)
        if not (self._is_changed or len(masks) or any(banned)):
            return None
        histories: dict[tuple[int, int], tuple[int, DrawRow]] = {}  # the samples of one prompt share its history
        history_of = torch.full((len(rows),), -1, dtype=torch.int32)
        for index in self._penalized:
            row = rows[index]
            history_of[index] = histories.setdefault((row.seq_id, row.position), (len(histories), row))[0]
        num_prompt_tokens = [min(row.num_prompt_tokens, row.position) for _, row in histories.values()]
        return LogitChanges(
            torch.tensor(mask_of, dtype=torch.int32),
            torch.from_numpy(masks),
            _token_lists(banned),
            *self._biases,
            history_of,
            _token_lists([row.history for _, row in histories.values()]),
            torch.tensor(num_prompt_tokens, dtype=torch.int64),
            self._penalties,
        )

    def _forbidden(
        self, rows: list[DrawRow], errors: dict[int, str]
    ) -> tuple[npt.NDArray[np.int32], list[int], list[list[int]]]:
        """Each distinct mask once [num_masks, num_words], the index of each row's mask, each row's banned tokens."""
        if self._words is None:  # kept from step to step, since fresh memory costs more than filling it
            self._words = np.empty((len(self.draws), -(-self.vocab // 32)), np.int32)
        count = 0
        known: dict[tuple[int, int], int] = {}
        mask_of, banned = [-1] * len(rows), [list[int]() for _ in rows]
        for index, row in enumerate(rows):
            try:
                fault_point("sampler.row", row.seq_id)
                key = (id(row.mask), id(self._allowed[index]))
                if key not in known:
                    has_mask = self.fill_allowed(index, row, self._words[count])
                    known[key] = count if has_mask else -1
                    count += has_mask
                mask_of[index], banned[index] = known[key], self.banned(index, row)
            except Exception as error:
                logger.exception("a token of sequence %d cannot be drawn", row.seq_id)
                errors[index] = f"its token could not be drawn: {type(error).__name__}"
        return self._words[:count], mask_of, banned


@dataclass(frozen=True, slots=True)
class _Banning:
    """Which tokens a draw bans, and when."""

    always: list[int]
    after: dict[int, list[tuple[int, ...]]]
    """Bad words of several tokens, by their last token but one."""
    min_tokens: int
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, draw: Draw) -> "_Banning":
        after: dict[int, list[tuple[int, ...]]] = {}
        for word in draw.bad_words:
            if len(word) > 1:
                after.setdefault(word[-2], []).append(word)
        return cls([word[0] for word in draw.bad_words if len(word) == 1], after, draw.min_tokens, draw.stop_token_ids)

    def token_ids(self, row: DrawRow) -> list[int]:
        num_output_tokens = row.position - row.num_prompt_tokens
        ids = self.always.copy()
        if num_output_tokens < self.min_tokens:
            ids += self.stop_token_ids
        if self.after:
            history = row.history
            for *prefix, last in self.after.get(int(history[-1]), ()):
                if len(prefix) <= num_output_tokens and history[-len(prefix) :].tolist() == prefix:
                    ids.append(last)
        return ids


def _is_penalized(draw: Draw) -> bool:
    return bool(draw.presence_penalty or draw.frequency_penalty or draw.repetition_penalty != 1.0)


def _rows_by_wish(draws: tuple[Draw, ...]) -> dict[tuple[int, LogprobsMode | None], Tensor]:
    rows: dict[tuple[int, LogprobsMode | None], list[int]] = {}
    for row, draw in enumerate(draws):
        if draw.logprobs is not None:
            rows.setdefault((draw.logprobs, draw.logprobs_mode), []).append(row)
    return {wish: torch.tensor(wanted) for wish, wanted in rows.items()}


def _allowed_words(token_ids: tuple[int, ...], vocab: int) -> MaskWords:
    allowed = np.zeros(-(-vocab // 32) * 32, bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _token_lists(lists: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> TokenLists:
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=starts[1:])
    ids = np.concatenate([np.asarray(ids, np.int32) for ids in lists if len(ids)] or [np.empty(0, np.int32)])
    return TokenLists(torch.from_numpy(starts), torch.from_numpy(ids))
