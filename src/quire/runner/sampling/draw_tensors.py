"""How the tokens of a step are drawn, as the kernels want it: what the draws say once, and what each step adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.common.batch import Draw, ScheduledSequence
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.common.params import LogprobsMode
from quire.kernels import LogitChanges, SamplingTensors, TokenLists
from quire.runner.sampling.random import uniform

Words = npt.NDArray[np.int32]
"""[ceil(vocab / 32)]: bit t % 32 of word t // 32 is set where token t may be drawn"""


class DrawTensors:
    """The draws of a step, one for each row of logits. Built again only when others come, or in another order."""

    def __init__(self, draws: tuple[Draw, ...], vocab: int) -> None:
        self.draws = draws
        self.vocab = vocab
        self.logprob_rows = _rows_by_wish(draws)
        """(number of likeliest tokens wanted, the draw's logprobs_mode) -> the rows [count] int64 that want so"""
        self.processed_rows = [row for row, draw in enumerate(draws) if draw.processors]
        self._cuts = (
            torch.tensor([d.temperature for d in draws], dtype=torch.float64),
            torch.tensor([d.top_k for d in draws], dtype=torch.int64),
            torch.tensor([d.top_p for d in draws], dtype=torch.float64),
            torch.tensor([d.min_p for d in draws], dtype=torch.float64),
        )
        self._keys = [d.random_key if d.temperature > 0 else None for d in draws]
        self._banning = {row: _Banning.of(d) for row, d in enumerate(draws) if d.bad_words or d.min_tokens}
        words = {ids: _allowed_words(ids, vocab) for ids in {d.allowed_token_ids for d in draws} if ids is not None}
        self._allowed = [None if d.allowed_token_ids is None else words[d.allowed_token_ids] for d in draws]
        self._penalized = [row for row, draw in enumerate(draws) if _is_penalized(draw)]
        self._words: Words | None = None
        self._is_changed = bool(self._penalized or words or any(d.logit_bias for d in draws))

    def at(self, sequences: Sequence[ScheduledSequence], errors: dict[int, str]) -> SamplingTensors:
        """For the next token of these, which the draws are of. What goes wrong in a row goes to `errors`, and what is
        drawn of it means nothing."""
        ends = [s.end for s in sequences for _ in s.draws]
        draws = [0.0 if k is None else uniform(k, end) for k, end in zip(self._keys, ends, strict=True)]
        changes = None
        if self._is_changed or self._banning or any(s.mask is not None for s in sequences):
            changes = self._changes([s for s in sequences for _ in s.draws], errors)
        return SamplingTensors(*self._cuts, torch.tensor(draws, dtype=torch.float64), changes)

    def fill_allowed(self, row: int, owner: ScheduledSequence, words: Words) -> bool:
        """What a row's token may be by its grammar and `allowed_token_ids`; the grammar's alone where they have nothing
        in common. False, and nothing written, if it may be anything."""
        allowed = self._allowed[row]
        if owner.mask is not None:
            fault_point("grammar.mask", owner.seq_id)
            owner.mask.fill(words)
            if allowed is not None and (both := words & allowed).any():
                words[:] = both
        elif allowed is not None:
            words[:] = allowed
        return owner.mask is not None or allowed is not None

    def banned(self, row: int, owner: ScheduledSequence) -> list[int]:
        """Tokens that would end a row's output too early, or complete one of its bad words."""
        banning = self._banning.get(row)
        return [] if banning is None else banning.token_ids(owner)

    @cached_property
    def _biases(self) -> tuple[TokenLists, Tensor]:
        biases = [d.logit_bias for d in self.draws]
        values = [value for bias in biases for _, value in bias]
        return _token_lists([[i for i, _ in bias] for bias in biases]), torch.tensor(values, dtype=torch.float32)

    @cached_property
    def _penalties(self) -> Tensor:
        penalties = [(d.repetition_penalty, d.frequency_penalty, d.presence_penalty) for d in self.draws]
        return torch.tensor(penalties, dtype=torch.float32)

    def _changes(self, owners: list[ScheduledSequence], errors: dict[int, str]) -> LogitChanges | None:
        """`owners`: the sequence of each row."""
        masks, mask_of, banned = self._forbidden(owners, errors)
        if not (self._is_changed or len(masks) or any(banned)):
            return None
        pasts: dict[int, tuple[int, ScheduledSequence]] = {}  # by sequence: samples of one prompt share its past
        history_of = torch.full((len(owners),), -1, dtype=torch.int32)
        for row in self._penalized:
            history_of[row] = pasts.setdefault(owners[row].seq_id, (len(pasts), owners[row]))[0]
        histories = [past_of(s) for _, s in pasts.values()]
        num_prompt_tokens = [min(s.num_prompt_tokens, s.end) for _, s in pasts.values()]
        return LogitChanges(
            torch.tensor(mask_of, dtype=torch.int32),
            torch.from_numpy(masks),
            _token_lists(banned),
            *self._biases,
            history_of,
            _token_lists(histories),
            torch.tensor(num_prompt_tokens, dtype=torch.int64),
            self._penalties,
        )

    def _forbidden(
        self, owners: list[ScheduledSequence], errors: dict[int, str]
    ) -> tuple[npt.NDArray[np.int32], list[int], list[list[int]]]:
        """Each different mask once [num_masks, num_words], which of them each row has, and what each row bans."""
        if self._words is None:  # kept from step to step, since fresh memory costs more than filling it
            self._words = np.empty((len(self.draws), -(-self.vocab // 32)), np.int32)
        count = 0
        index: dict[tuple[int, int], int] = {}
        mask_of, banned = [-1] * len(owners), [list[int]() for _ in owners]
        for row, owner in enumerate(owners):
            try:
                fault_point("sampler.row", owner.seq_id)
                key = (id(owner.mask), id(self._allowed[row]))
                if key not in index:
                    has_mask = self.fill_allowed(row, owner, self._words[count])
                    index[key] = count if has_mask else -1
                    count += has_mask
                mask_of[row], banned[row] = index[key], self.banned(row, owner)
            except Exception as error:  # a grammar's, or a draw's
                logger.exception("a token of sequence %d cannot be drawn", owner.seq_id)
                errors[row] = f"its token could not be drawn: {type(error).__name__}"
        return self._words[:count], mask_of, banned


@dataclass(frozen=True, slots=True)
class _Banning:
    """Which tokens a draw bans, and when."""

    always: list[int]
    after: dict[int, list[tuple[int, ...]]]
    """bad words of several tokens, by their last but one"""
    min_tokens: int
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, draw: Draw) -> "_Banning":
        after: dict[int, list[tuple[int, ...]]] = {}
        for word in draw.bad_words:
            if len(word) > 1:
                after.setdefault(word[-2], []).append(word)
        return cls([word[0] for word in draw.bad_words if len(word) == 1], after, draw.min_tokens, draw.stop_token_ids)

    def token_ids(self, owner: ScheduledSequence) -> list[int]:
        num_output_tokens = owner.end - owner.num_prompt_tokens
        ids = self.always.copy()
        if num_output_tokens < self.min_tokens:
            ids += self.stop_token_ids
        if self.after and num_output_tokens > 0:
            past = past_of(owner)
            for *prefix, last in self.after.get(int(past[-1]), ()):
                if len(prefix) <= num_output_tokens and past[-len(prefix) :].tolist() == prefix:
                    ids.append(last)
        return ids


def past_of(owner: ScheduledSequence) -> npt.NDArray[np.int32]:
    """The tokens so far of a sequence with a draw that needs them."""
    assert owner.past is not None, f"sequence {owner.seq_id} was scheduled without the past that its draw needs"
    return owner.past


def _is_penalized(draw: Draw) -> bool:
    return bool(draw.presence_penalty or draw.frequency_penalty or draw.repetition_penalty != 1.0)


def _rows_by_wish(draws: tuple[Draw, ...]) -> dict[tuple[int, LogprobsMode | None], Tensor]:
    rows: dict[tuple[int, LogprobsMode | None], list[int]] = {}
    for row, draw in enumerate(draws):
        if draw.logprobs is not None:
            rows.setdefault((draw.logprobs, draw.logprobs_mode), []).append(row)
    return {wish: torch.tensor(wanted) for wish, wanted in rows.items()}


def _allowed_words(token_ids: tuple[int, ...], vocab: int) -> Words:
    allowed = np.zeros(-(-vocab // 32) * 32, bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _token_lists(lists: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> TokenLists:
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=starts[1:])
    ids = np.concatenate([np.asarray(ids, np.int32) for ids in lists if len(ids)] or [np.empty(0, np.int32)])
    return TokenLists(torch.from_numpy(starts), torch.from_numpy(ids))
