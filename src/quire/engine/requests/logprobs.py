"""Log-probabilities on their way from the executor to the caller. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.common.batch import ScoredRows, TokenLogprobs
from quire.common.outputs import Logprob

DecodeToken = Callable[[int], str]
"""Returns the text of one token by itself."""


class LogprobRows:
    """One row for each token of a sequence. Commit adds rows; dicts are made of them once, when they are needed."""

    __slots__ = ("_decode", "_keeps", "_made", "_num_taken", "_waiting", "total")

    def __init__(self, decode: DecodeToken | None, *, keeps: bool = True) -> None:
        """Without `decode` the dicts contain no text; without `keeps` only the total is kept."""
        self._decode = decode
        self._keeps = keeps
        self._waiting: list[tuple[TokenLogprobs, int]] = []
        self._made: list[dict[int, Logprob]] = []
        self._num_taken = 0
        self.total = 0.0
        """The sum over the tokens."""

    def __len__(self) -> int:
        return self._num_taken + len(self._made) + len(self._waiting)

    def extend(self, logprobs: TokenLogprobs) -> None:
        """Add the rows of the next tokens."""
        for row, logprob in enumerate(logprobs.logprobs[:, 0].tolist()):
            self.total += logprob
            if self._keeps:
                self._waiting.append((logprobs, row))

    def to_dicts(self, start: int = 0) -> list[dict[int, Logprob]] | None:
        """Return the rows from `start` on, each by token id; None if they are not kept."""
        self.make(len(self._waiting))
        return self._made[start:] if self._keeps else None

    def make(self, limit: int) -> bool:
        """Make dicts of the next `limit` rows, so that `to_dicts` has less to do. Returns whether there are more."""
        self._made += [self._to_dict(logprobs, row) for logprobs, row in self._waiting[:limit]]
        del self._waiting[:limit]
        return len(self._waiting) > 0

    def take(self) -> TokenLogprobs | None:
        """Return the rows added since the last call, and do not keep them, since dicts are made of them elsewhere. None
        if there are none."""
        if not self._waiting:
            return None
        waiting, self._waiting = self._waiting, []
        self._num_taken += len(waiting)
        return TokenLogprobs(
            np.stack([logprobs.token_ids[row] for logprobs, row in waiting]),
            np.stack([logprobs.logprobs[row] for logprobs, row in waiting]),
            np.array([logprobs.ranks[row] for logprobs, row in waiting], np.int32),
        )

    def fork(self) -> LogprobRows:
        """Return a copy that continues by itself."""
        other = LogprobRows(self._decode, keeps=self._keeps)
        other._waiting, other._made, other.total = list(self._waiting), list(self._made), self.total
        return other

    def _to_dict(self, logprobs: TokenLogprobs, row: int) -> dict[int, Logprob]:
        """The token itself comes first, with its rank; the likeliest tokens follow in order."""
        made: dict[int, Logprob] = {}
        pairs = zip(logprobs.token_ids[row].tolist(), logprobs.logprobs[row].tolist(), strict=True)
        for place, (token_id, logprob) in enumerate(pairs):
            if token_id not in made:
                text = None if self._decode is None else self._decode(token_id)
                made[token_id] = Logprob(logprob, place or int(logprobs.ranks[row]), text)
        return made


class PromptScores:
    """Known tokens whose log-probabilities are wanted. The prompt token before each one predicts it.

    They are scored in order as the prompt is computed, and not again after a preemption. Hidden states are not cached,
    so tokens that predict one that is not scored yet may not come from the prefix cache.
    """

    __slots__ = ("first", "num_top", "rows", "token_ids")

    def __init__(self, first: int, token_ids: list[int], num_top: int, decode: DecodeToken | None) -> None:
        """`first`: position of the first of `token_ids`, at least 1. `num_top`: likeliest tokens beside each."""
        self.first = first
        self.token_ids = token_ids
        self.num_top = num_top
        self.rows = LogprobRows(decode)

    @property
    def is_done(self) -> bool:
        """Whether all tokens are scored."""
        return len(self.rows) == len(self.token_ids)

    @property
    def max_cached_tokens(self) -> int | None:
        """The most prompt tokens that may come from the prefix cache; None for any number."""
        return None if self.is_done else self.first + len(self.rows) - 1

    def due(self, start: int, end: int) -> ScoredRows | None:
        """Return the tokens not scored yet that the tokens from position `start` to `end` predict."""
        num_scored = len(self.rows)
        token_ids = tuple(self.token_ids[num_scored : max(0, end - self.first + 1)])
        return ScoredRows(self.first + num_scored - 1 - start, token_ids, self.num_top) if token_ids else None

    def to_dicts(self) -> list[dict[int, Logprob] | None]:
        """Return the scored tokens by position; None for the positions before the first."""
        return [*[None] * self.first, *(self.rows.to_dicts() or ())]
