"""Log-probabilities of tokens given beforehand, a bounded number of rows of logits at a time."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.common.batch import ScheduledSequence, Scored, TokenLogprobs
from quire.common.faults import fault_point
from quire.runner.sampling.sampler import MAX_LOGITS_ROWS, top_logprobs


def score(
    sequences: Sequence[ScheduledSequence], first_rows: Sequence[int], compute_logits: Callable[[Tensor], Tensor]
) -> dict[int, TokenLogprobs]:
    """By place in `sequences`, where tokens are scored: one row for each, raw log-probabilities in any mode.

    `first_rows`: where each sequence's tokens begin among all of the step; `compute_logits` turns such rows [count]
    int64 into logits [count, vocab] float32. Rows of several sequences are taken together; a row's bits are the same
    in any company.
    """
    wanted: dict[int, list[tuple[int, Scored]]] = {}
    for place, s in enumerate(sequences):
        if s.scored is not None:
            wanted.setdefault(s.scored.num_top, []).append((place, s.scored))
    results = {}
    for num_top, group in wanted.items():
        fault_point("scoring.rows")
        spans = [(first_rows[place] + scored.row, len(scored.token_ids)) for place, scored in group]
        rows = torch.from_numpy(np.concatenate([np.arange(first, first + count) for first, count in spans]))
        token_ids = torch.tensor([token_id for _, scored in group for token_id in scored.token_ids])
        parts = [
            top_logprobs(compute_logits(some), torch.arange(len(some)), tokens, num_top)
            for some, tokens in zip(
                torch.split(rows, MAX_LOGITS_ROWS), torch.split(token_ids, MAX_LOGITS_ROWS), strict=True
            )
        ]
        joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("token_ids", "logprobs", "ranks")]
        ends = np.cumsum([count for _, count in spans])
        for (place, _), (_, count), end in zip(group, spans, ends, strict=True):
            results[place] = TokenLogprobs(*(values[end - count : end] for values in joined))
    return results
