"""Where the rows of a step lie: one for each scheduled token, sequence after sequence, without padding."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.common.batch import BlockIds, ScheduledSequence
from quire.config.parallel import Range

Ints = npt.NDArray[np.int64]


class RowLayout(NamedTuple):
    """The rows of a step."""

    token_ids: Ints
    """[num_rows]"""
    positions: Ints
    """[num_rows]"""
    sequence_of: Ints
    """[num_rows]: index of the row's sequence"""
    query_start: Ints
    """[num_seqs + 1]: sequence s owns rows query_start[s] to query_start[s + 1]"""
    seq_lens: Ints
    """[num_seqs]: tokens of each sequence once the step is done"""
    adapters: Ints | None
    """[num_rows]: the slot of each row's adapter, -1 for none; None if no row has one"""

    token_type_ids: Ints | None = None
    """[num_rows]: which text of a pair each token belongs to; None if all are 0"""

    def slots(self, block_tables: BlockIds, block_size: int) -> Ints:
        """block_tables [num_seqs, max_blocks] -> [num_rows]: where each row's key and value are written."""
        blocks = block_tables[self.sequence_of, self.positions // block_size].astype(np.int64)
        return blocks * block_size + self.positions % block_size

    def part(self, spans: Sequence[Range]) -> tuple[Ints, "RowLayout"]:
        """Of each sequence the rows from the first to before the second number: which they are, and their layout."""
        firsts, ends = np.array(spans, np.int64).T
        query_start = np.array([0, *accumulate(ends - firsts)], np.int64)
        rows = np.arange(query_start[-1]) + (self.query_start[:-1] + firsts - query_start[:-1]).repeat(ends - firsts)
        return rows, RowLayout(
            self.token_ids[rows],
            self.positions[rows],
            self.sequence_of[rows],
            query_start,
            self.seq_lens - np.diff(self.query_start) + ends,  # as if no tokens followed, which these do not see
            None if self.adapters is None else self.adapters[rows],
        )

    def read_rows(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """[num_draws]: the row that each draw of the step's sequences reads."""
        return [
            row
            for s, end in zip(sequences, self.query_start[1:].tolist(), strict=True)
            if s.drawn is not None
            for row in range(end - s.drawn.num_rows, end)
            for _ in s.drawn.draws
        ]


def num_drawn(s: ScheduledSequence) -> int:
    """From how many rows of a sequence tokens are drawn."""
    return 0 if s.drawn is None else s.drawn.num_rows


def read_span(s: ScheduledSequence) -> Range:
    """The rows of a sequence whose hidden states are read: those that are pooled, or from the first that is scored or
    drawn from to the end."""
    if s.pooled is not None:
        return s.pooled.row, s.pooled.row + s.pooled.num_rows
    end = len(s.token_ids)
    first = end - num_drawn(s)
    return (first if s.scored is None else min(first, s.scored.row)), end


def row_layout(sequences: Sequence[ScheduledSequence]) -> RowLayout:
    """The layout of one step's sequences."""
    token_ids = [s.token_ids for s in sequences]
    lens = [len(ids) for ids in token_ids]
    query_start = np.array([0, *accumulate(lens)], np.int64)
    positions = np.array([s.start for s in sequences], np.int64)
    sequence_of = np.arange(len(sequences))
    seq_lens = positions + lens
    num_rows = sum(lens)
    if num_rows > len(sequences):  # else each has one row
        positions = np.arange(num_rows) + (positions - query_start[:-1]).repeat(lens)
        sequence_of = sequence_of.repeat(lens)
    adapters = [s.adapter for s in sequences]
    return RowLayout(
        np.fromiter(chain.from_iterable(token_ids), np.int64, num_rows),
        positions,
        sequence_of,
        query_start,
        seq_lens,
        np.array(adapters, np.int64)[sequence_of] if max(adapters) >= 0 else None,
        _token_type_ids(sequences) if any(s.token_type_ids is not None for s in sequences) else None,
    )


def _token_type_ids(sequences: Sequence[ScheduledSequence]) -> Ints:
    types = [s.token_type_ids or (0,) * len(s.token_ids) for s in sequences]
    return np.fromiter(chain.from_iterable(types), np.int64)
