"""From a sequence and a number of tokens to its entry in the Batch: which tokens run, which rows are wanted."""

import numpy as np

from quire.common.batch import Ahead, BlockIds, DrawnRows, MaskWords, ScheduledSequence
from quire.common.faults import fault_point
from quire.engine.requests.sequence import Sequence


def scheduled_sequence(
    seq: Sequence,
    num_tokens: int,
    drafts: tuple[int, ...],
    block_tables: tuple[BlockIds, ...],
    adapter: int = -1,
    ahead: Ahead | None = None,
) -> ScheduledSequence:
    """The sequence's next `num_tokens` tokens, and behind its newest token the `drafts`; `adapter` is the slot of its
    LoRA adapter, -1 for none; `ahead` says what a draft model does."""
    token_ids, start = seq.token_ids, seq.num_computed_tokens
    end = start + num_tokens
    is_last = end == len(token_ids)
    drawn = seq.drawn_rows if is_last else None
    pooled, types = (None, None) if seq.pooling is None else seq.pooling.due(start, end)
    if drawn is not None and (drafts or seq.needs_history or seq.grammar is not None):
        drawn = _drawn_rows(seq, drafts)
        drafts = drafts[: drawn.num_rows - 1]
    return ScheduledSequence(
        seq.seq_id,
        ((token_ids[-1],) if is_last and num_tokens == 1 else tuple(token_ids[start:end])) + drafts,
        start,
        block_tables,
        drawn,
        None if seq.scores is None else seq.scores.due(start, end),
        pooled,
        adapter,
        types,
        ahead,
    )


def _drawn_rows(seq: Sequence, drafts: tuple[int, ...]) -> DrawnRows:
    """The row of the newest token and those of the drafts that the grammar allows."""
    history = seq.history() if seq.needs_history else None
    masks = None if seq.grammar is None else _masks(seq, drafts)
    if masks is not None:
        drafts = drafts[: len(masks) - 1]
    if history is not None and drafts:
        history = np.concatenate([history, np.array(drafts, np.int32)])
    return DrawnRows(seq.draws, seq.num_prompt_tokens, 1 + len(drafts), history, masks)


def _masks(seq: Sequence, drafts: tuple[int, ...]) -> tuple[MaskWords, ...]:
    """By row, what the grammar allows behind it; it ends before the first draft that the grammar forbids."""
    assert seq.grammar is not None
    fault_point("grammar.mask", seq.seq_id)
    masks = [seq.grammar.mask()]
    trial = seq.grammar.trial() if drafts else None
    for token_id in drafts:
        if trial is None or not trial.advance(token_id):
            break
        mask = trial.mask()
        if trial.error is not None:
            break
        masks.append(mask)
    return tuple(masks)
