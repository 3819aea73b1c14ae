"""From logits to tokens and log-probabilities: of tokens that are drawn, and of known tokens that are scored."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import ScheduledSequence, ScoredRows, StepResult, TokenLogprobs
from quire.common.faults import fault_point
from quire.common.params import LogprobsMode
from quire.config.parallel import shares
from quire.kernels import SamplingTensors
from quire.runner.sampling.draw_tensors import DrawTensors, draws_of
from quire.runner.sampling.processors import run_processors

MAX_LOGITS_ROWS = 64
"""Largest number of rows of [rows, vocab] that are computed at a time, beside the logits of the draws."""


class Sampler:
    """Draws the tokens of a step."""

    def __init__(
        self,
        backend: kernels.Backend,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        ranks: kernels.Ranks | None = None,
    ) -> None:
        """`ranks`: those that help to draw, by an IdleSampler each."""
        self._mode, self._draw = logprobs_mode, SharedDraws(ranks)
        # Not the model's workspace: that one may reuse the memory of a decode graph's logits.
        self._workspace = backend.workspace()

    def sample(self, logits: Tensor, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """The token of each draw, for logits [num_draws, vocab] float32, and log-probabilities where draws want them.

        A row's outcome depends on that row alone. The logits stay as they are.
        """
        draws = self._draw.tensors_of(sequences, logits.shape[1])
        with self._workspace:
            changed = logits
            errors: dict[int, str] = {}
            if draws.processed_rows:
                changed, errors = run_processors(logits, draws, sequences)
            how = draws.at(sequences, errors)
            fault_point("sampler.draw")
            draw = kernels.sample if draws.processed_rows else self._draw
            token_ids = draw(changed, how)
            logprobs = self._logprobs(draws, logits, changed, how, token_ids)
        return StepResult(tuple(token_ids.tolist()), logprobs, errors=errors)

    def score(
        self,
        sequences: Sequence[ScheduledSequence],
        first_rows: Sequence[int],
        compute_logits: Callable[[Tensor], Tensor],
    ) -> dict[int, TokenLogprobs]:
        """By index in `sequences`, where tokens are scored: one row for each, raw log-probabilities in any mode.

        `first_rows`: where each sequence's tokens begin among all of the step; `compute_logits` turns such rows [count]
        int64 into logits [count, vocab] float32. Rows of several sequences are scored together; a row's bits do not
        depend on the others.
        """
        results: dict[int, TokenLogprobs] = {}
        for rows, token_ids, num_top, counts in _scored_rows(sequences, first_rows):
            fault_point("scoring.rows")
            found = _top_logprobs(
                rows, token_ids, num_top, lambda some: (compute_logits(some), torch.arange(len(some)))
            )
            results.update(zip(counts, _split(found, list(counts.values())), strict=True))
        return results

    def _logprobs(
        self, draws: DrawTensors, logits: Tensor, changed: Tensor, how: SamplingTensors, token_ids: Tensor
    ) -> dict[int, TokenLogprobs]:
        results: dict[int, TokenLogprobs] = {}
        for (num_top, own_mode), rows in draws.logprob_rows.items():
            mode = own_mode or self._mode

            def read(some: Tensor, is_processed: bool = mode.startswith("processed")) -> tuple[Tensor, Tensor]:
                if not is_processed:
                    return logits, some
                return kernels.processed_logits(changed, how, some), torch.arange(len(some))

            found = _top_logprobs(rows, token_ids[rows], num_top, read, mode.endswith("logprobs"))
            results.update(zip(rows.tolist(), _split(found, [1] * len(rows)), strict=True))
        return results


class SharedDraws:
    """Draws the tokens of a step in one process, or each of several ranks a share where all have the logits. Keeps the
    tensors of the latest draws, which the next step usually has too."""

    def __init__(self, ranks: kernels.Ranks | None) -> None:
        self._ranks, self._draws = ranks, DrawTensors((), 1)
        self._gathers: dict[int, kernels.Gather] = {}
        """By the number of rows: they take as long to make as to use."""

    def tensors_of(self, sequences: Sequence[ScheduledSequence], vocab: int) -> DrawTensors:
        """The draws of these sequences."""
        draws = draws_of(sequences)
        if draws != self._draws.draws:
            self._draws = DrawTensors(draws, vocab)
        return self._draws

    def __call__(self, logits: Tensor, how: SamplingTensors) -> Tensor:
        """A token for each row, [num_rows] int64, in the first rank. All must call it, or none."""
        ranks, num_rows = self._ranks, len(logits)
        if ranks is None or num_rows == 1 or not ranks.have_all(logits):
            return kernels.sample(logits, how)
        counts = shares(num_rows, ranks.shard.num_ranks)
        start, end = ranks.shard.range_of(counts)
        own = kernels.sample(logits[start:end], how.of_rows(start, end)).view(torch.int32)  # two numbers for each
        if num_rows not in self._gathers:
            self._gathers[num_rows] = kernels.Gather(ranks, [2 * count for count in counts], first_only=True)
        return self._gathers[num_rows](own[None])[0].view(torch.int64)


class IdleSampler:
    """In the place of a Sampler in a process whose logits another one reads. Where it has all logits, it draws its
    share of the tokens, for the other one."""

    def __init__(self, ranks: kernels.Ranks | None = None) -> None:
        """`ranks`: those that draw together."""
        self._ranks, self._draw = ranks, SharedDraws(ranks)

    def sample(self, logits: Tensor, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """No tokens."""
        if self._ranks is not None and len(logits) > 1 and self._ranks.have_all(logits):
            draws = self._draw.tensors_of(sequences, logits.shape[1])
            if not draws.processed_rows:  # whose logits the other one changes for itself
                self._draw(logits, draws.at(sequences, {}))
        return StepResult(())

    def score(
        self,
        sequences: Sequence[ScheduledSequence],
        first_rows: Sequence[int],
        compute_logits: Callable[[Tensor], Tensor],
    ) -> dict[int, TokenLogprobs]:
        """Computes the logits that a Sampler reads, and returns nothing."""
        for rows, _, _, _ in _scored_rows(sequences, first_rows):
            for some in torch.split(rows, MAX_LOGITS_ROWS):
                compute_logits(some)
        return {}


def _scored_rows(
    sequences: Sequence[ScheduledSequence], first_rows: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, int, dict[int, int]]]:
    """For each number of likeliest tokens that is wanted: the rows, the token of each, that number, and how many rows
    are of which sequence."""
    wanted: dict[int, list[tuple[int, ScoredRows]]] = {}
    for place, s in enumerate(sequences):
        if s.scored is not None:
            wanted.setdefault(s.scored.num_top, []).append((place, s.scored))
    for num_top, group in wanted.items():
        counts = {place: len(scored.token_ids) for place, scored in group}
        starts = [first_rows[place] + scored.row for place, scored in group]
        ranges = [np.arange(start, start + count) for start, count in zip(starts, counts.values(), strict=True)]
        token_ids = torch.tensor([token_id for _, scored in group for token_id in scored.token_ids])
        yield torch.from_numpy(np.concatenate(ranges)), token_ids, num_top, counts


def _top_logprobs(
    rows: Tensor,
    token_ids: Tensor,
    num_top: int,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    normalized: bool = True,
) -> TokenLogprobs:
    """One row for each of `rows` [count] int64, with its token in token_ids [count].

    `read` is called with a bounded number of them at a time, and returns logits [any, vocab] float32 with the indices
    of these rows in it.
    """
    parts = []
    for some, tokens in zip(torch.split(rows, MAX_LOGITS_ROWS), torch.split(token_ids, MAX_LOGITS_ROWS), strict=True):
        logits, at = read(some)
        top = min(num_top, logits.shape[1])
        parts.append(
            [part.numpy() for part in kernels.top_logprobs(logits, tokens, top, rows=at, normalized=normalized)]
        )
    return TokenLogprobs(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _split(logprobs: TokenLogprobs, counts: Sequence[int]) -> list[TokenLogprobs]:
    """The first `counts[0]` rows, the next `counts[1]`, and so on."""
    parts = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    return [TokenLogprobs(logprobs.token_ids[p], logprobs.logprobs[p], logprobs.ranks[p]) for p in parts]
