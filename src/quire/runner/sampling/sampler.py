"""From logits to tokens and their log-probabilities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import ScheduledSequence, StepResult, TokenLogprobs
from quire.common.faults import fault_point
from quire.common.params import LogprobsMode
from quire.kernels import SamplingTensors
from quire.runner.sampling.draw_tensors import DrawTensors, draws_of
from quire.runner.sampling.processors import run_processors

MAX_LOGITS_ROWS = 64
"""rows of [rows, vocab] that are made at once beside the logits of the draws"""


class Sampler:
    """Draws the tokens of a step. Keeps the tensors of the latest draws, which the next step usually has too."""

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self._mode = logprobs_mode
        self._draws = DrawTensors((), 1)
        # Not the model's: that may give away the logits of a decode graph.
        self._workspace = kernels.backend_for("cpu").workspace()

    def sample(self, logits: Tensor, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """The token of each draw, for logits [num_draws, vocab] float32, and log-probabilities where draws want them.

        A row's outcome depends on that row alone. The logits stay as they are.
        """
        draws = draws_of(sequences)
        if draws != self._draws.draws or logits.shape[1] != self._draws.vocab:
            self._draws = DrawTensors(draws, logits.shape[1])
        with self._workspace:
            changed, errors = logits, dict[int, str]()
            if self._draws.processed_rows:
                changed, errors = run_processors(logits, self._draws, sequences)
            how = self._draws.at(sequences, errors)
            fault_point("sampler.draw")
            token_ids = kernels.sample(changed, how)
            logprobs = self._logprobs(logits, changed, how, token_ids)
        return StepResult(tuple(token_ids.tolist()), logprobs, errors=errors)

    def _logprobs(
        self, logits: Tensor, changed: Tensor, how: SamplingTensors, token_ids: Tensor
    ) -> dict[int, TokenLogprobs]:
        results = {}
        for (num_top, own_mode), all_rows in self._draws.logprob_rows.items():
            mode = own_mode or self._mode
            for rows in torch.split(all_rows, MAX_LOGITS_ROWS):
                source, at = logits, rows
                if mode.startswith("processed"):
                    source, at = kernels.processed_logits(changed, how, rows), torch.arange(len(rows))
                result = top_logprobs(source, at, token_ids[rows], num_top, mode.endswith("logprobs"))
                for i, row in enumerate(rows.tolist()):
                    part = slice(i, i + 1)
                    results[row] = TokenLogprobs(result.token_ids[part], result.logprobs[part], result.ranks[part])
        return results


def top_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int, normalized: bool = True
) -> TokenLogprobs:
    """One row for each of `rows` [count] int64 of the logits, with its token in token_ids [count]."""
    num_top = min(num_top, logits.shape[1])
    ids, logprobs, ranks = kernels.top_logprobs(logits, token_ids, num_top, rows=rows, normalized=normalized)
    return TokenLogprobs(ids.numpy(), logprobs.numpy(), ranks.numpy())
