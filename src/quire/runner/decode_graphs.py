"""Short steps, recorded once for each number of rows, with and without adapters, then replayed.

In a decode step each sequence runs the tokens whose successors it draws: its newest token, and drafts behind it. Before
them may be tokens whose successors are known: the others of a short prompt, and those that a grammar forced. Passes of
what drafts are recorded too.

Sequences are followed by empty ones until there are as many as rows. So steps with the same number of rows replay the
same recording, whichever sequences have them, and a batch that shrinks needs few recordings.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import BlockIds, ScheduledSequence
from quire.config.parallel import Range
from quire.kernels.backends.reference_backend import TorchThreads
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors, LayerCache, ReadRows, most_read
from quire.runner.row_layout import RowLayout, num_drawn, row_layout

MAX_ROWS = 256
"""A step of more rows takes so long that Python's share of it no longer matters."""
MAX_RECORDINGS = 512
"""Recordings that are kept, the last used ones, since there are many combinations of rows and logits."""


class Recordable(Protocol):
    """A CausalLM, or what computes as one."""

    @property
    def can_record(self) -> bool:
        """As of Model."""

    @property
    def needs_torch(self) -> bool:
        """As of Model."""

    @property
    def can_narrow(self) -> bool:
        """As of Model."""

    def __call__(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Any:
        """As `Model.forward`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As of CausalLM."""


_Shape = tuple[int, bool, int | None]
"""Number of rows, whether some have adapters, and number of logits, which are those of every row if it is None."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: kernels.KernelGraph
    logits: Tensor | None
    """[num_logits, vocab] float32, where a replay writes them. The memory is shared with other computations."""


class _Rows:
    """Inputs of a pass for its rows: the first of arrays that stay in place."""

    def __init__(self, num_groups: int) -> None:
        self._token_ids = np.zeros(MAX_ROWS, np.int64)
        self._positions = np.zeros(MAX_ROWS, np.int64)
        self._query_start = np.zeros(MAX_ROWS + 1, np.int32)
        self._adapters = np.full(MAX_ROWS, -1, np.int64)
        self._slots = np.zeros((num_groups, MAX_ROWS), np.int64)

    def fill(self, layout: RowLayout, num_seqs: int, tables: np.ndarray, block_size: int) -> None:
        """`tables` [num_groups, at least the sequences of `layout`, max_blocks]. More sequences, up to `num_seqs`, are
        empty."""
        num_rows, num_own = len(layout.token_ids), len(layout.seq_lens)
        self._token_ids[:num_rows] = layout.token_ids
        self._positions[:num_rows] = layout.positions
        self._query_start[: num_own + 1] = layout.query_start
        self._query_start[num_own + 1 : num_seqs + 1] = num_rows
        if layout.adapters is not None:
            self._adapters[:num_rows] = layout.adapters
        for slots, each in zip(self._slots, tables, strict=True):
            slots[:num_rows] = layout.slots(each, block_size)

    def tensors(
        self,
        num_rows: int,
        seq_lens: Tensor,
        tables: Sequence[Tensor],
        logit_rows: Tensor,
        *,
        has_adapters: bool,
        read: ReadRows | None = None,
    ) -> BatchTensors:
        """The first rows, of as many sequences as there are lengths."""
        return BatchTensors(
            token_ids=_first(self._token_ids, num_rows),
            positions=_first(self._positions, num_rows),
            query_start=_first(self._query_start, len(seq_lens) + 1),
            seq_lens=seq_lens,
            groups=tuple(
                GroupTensors(_first(slots, num_rows), each) for slots, each in zip(self._slots, tables, strict=True)
            ),
            logit_rows=logit_rows,
            adapters=_first(self._adapters, num_rows) if has_adapters else None,
            read=read,
        )


def _first(array: np.ndarray, count: int) -> Tensor:
    return torch.from_numpy(array[:count])


class DecodeGraphs:
    """The recordings, which the backend must be able to make, and the inputs they share."""

    def __init__(
        self,
        model: Recordable,
        kv: Sequence[LayerCache],
        block_size: int,
        max_blocks: int,
        backend: kernels.Backend,
        workspace: kernels.Workspace,
    ) -> None:
        self._backend = backend
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._workspace = workspace
        self._torch_threads = partial(TorchThreads, 1) if model.needs_torch else nullcontext
        num_groups = 1 + max(layer.group for layer in kv)
        self._rows, self._last = _Rows(num_groups), _Rows(num_groups)
        """Of all tokens, and of those that the last layer computes if it leaves some out."""
        self._last_rows = np.zeros(MAX_ROWS, np.int64)
        """The rows of the latter."""
        self._every_row = np.arange(MAX_ROWS)
        self._some_rows = np.zeros(MAX_ROWS, np.int64)
        self._seq_lens = np.zeros(MAX_ROWS, np.int32)
        self._block_tables = np.zeros((num_groups, MAX_ROWS, max_blocks), np.int32)
        self._known_tables: list[list[BlockIds | None]] = [[None] * MAX_ROWS for _ in range(num_groups)]
        self._recorded: OrderedDict[_Shape, _Recorded] = OrderedDict()

    def can_replay(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether backend and model can be recorded, and this is a step that is small enough.

        What torch computes keeps memory in each recording: with it, only decode steps are, which have few shapes.
        """
        if not (self._backend.can_record and self._model.can_record and is_small_step(sequences)):
            return False
        return not self._model.needs_torch or sum(map(num_drawn, sequences)) == sum(len(s.token_ids) for s in sequences)

    def logits(self, sequences: Sequence[ScheduledSequence]) -> Tensor | None:
        """[num_read, vocab] float32 of the rows that are read, valid until the next step; None if none is read. The
        sequences may have any rows, MAX_ROWS in all, and one draw for each that is read."""
        layout, counts = row_layout(sequences), list(map(num_drawn, sequences))
        num_rows, num_read = len(layout.token_ids), sum(counts)
        self._fill(sequences, layout)
        has_adapters = layout.adapters is not None
        if num_read == num_rows:
            return self._replayed((num_rows, has_adapters, None))
        # More are computed, and fewer numbers recorded.
        num_logits = min(num_rows, 1 << (num_read - 1).bit_length()) if num_read else 0
        if self._leaves_out(num_rows, num_logits):
            rows, layout = layout.part(_last_rows(sequences, counts, num_logits - num_read))
            self._last_rows[:num_logits] = rows
            self._last.fill(layout, num_rows, self._block_tables, self._block_size)
        self._some_rows[:num_logits] = (*layout.read_rows(sequences), *repeat(0, num_logits - num_read))
        logits = self._replayed((num_rows, has_adapters, num_logits))
        return None if logits is None else logits[:num_read]

    def advance(self, sequences: Sequence[ScheduledSequence]) -> None:
        """As `logits`, in a stage that has no logits."""
        layout = row_layout(sequences)
        self._fill(sequences, layout)
        self._replayed((len(layout.token_ids), layout.adapters is not None, 0))

    def _leaves_out(self, num_rows: int, num_logits: int) -> bool:
        """Whether the last layer computes only as many rows as there are logits."""
        return self._model.can_narrow and num_logits <= most_read(num_rows)

    def _replayed(self, shape: _Shape) -> Tensor | None:
        """The logits of the first `num_logits` of `_some_rows`, or of every row."""
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._recorded[shape] = self._record(shape)
            if len(self._recorded) > MAX_RECORDINGS:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(shape)
            with self._torch_threads():
                recorded.graph.replay()
        return recorded.logits

    def _fill(self, sequences: Sequence[ScheduledSequence], layout: RowLayout) -> None:
        num_seqs, num_rows = len(sequences), len(layout.token_ids)
        self._seq_lens[:num_seqs] = layout.seq_lens
        self._seq_lens[num_seqs:num_rows] = 0
        for group, known in enumerate(self._known_tables):
            tables = self._block_tables[group]
            for place, s in enumerate(sequences):
                table = s.block_tables[group]
                if table is not known[place]:  # a table that has changed is a new array
                    tables[place, : len(table)] = table
                    known[place] = table
        self._rows.fill(layout, num_rows, self._block_tables, self._block_size)

    def _record(self, shape: _Shape) -> _Recorded:
        """Run the step, and keep what it ran."""
        graph, logits = self._backend.graph(), None
        with self._workspace.recording(), graph.record(with_torch=self._model.needs_torch):
            tensors, are_all = self._tensors(*shape), shape[-1] is None
            hidden = self._model(tensors, self._kv)  # [num_rows, hidden], or of those that the last layer computes
            if not are_all:
                hidden = kernels.embedding(tensors.logit_rows, hidden)
            if len(hidden):
                logits = kernels.borrowed(self._model.compute_logits(hidden))
        return _Recorded(graph, logits)

    def _tensors(self, num_rows: int, has_adapters: bool, num_logits: int | None) -> BatchTensors:
        tables = [_first(each, num_rows) for each in self._block_tables]
        logit_rows = _first(self._every_row, num_rows) if num_logits is None else _first(self._some_rows, num_logits)
        shared = _first(self._seq_lens, num_rows), tables, logit_rows
        read = None
        if num_logits is not None and self._leaves_out(num_rows, num_logits):
            last = self._last.tensors(num_logits, *shared, has_adapters=has_adapters)
            read = ReadRows(_first(self._last_rows, num_logits), last)
        return self._rows.tensors(num_rows, *shared, has_adapters=has_adapters, read=read)


def _last_rows(sequences: Sequence[ScheduledSequence], counts: Sequence[int], num_more: int) -> list[Range]:
    """The last rows of sequences, of which there are `counts`, and `num_more` before them, wherever there are some."""
    spans = list[Range]()
    for s, count in zip(sequences, counts, strict=True):
        end = len(s.token_ids)
        added = min(num_more, end - count)
        spans.append((end - count - added, end))
        num_more -= added
    return spans


def is_small_step(sequences: Sequence[ScheduledSequence]) -> bool:
    """Whether a step of these sequences only draws tokens, one from each row that is read, and has at most MAX_ROWS."""
    return (
        len(sequences) <= MAX_ROWS
        and all(map(_only_draws, sequences))
        and sum([len(s.token_ids) for s in sequences]) <= MAX_ROWS
    )


def _only_draws(s: ScheduledSequence) -> bool:
    """Whether at most one token is drawn behind each of its tokens, and nothing else is wanted of them."""
    return (
        (s.drawn is None or len(s.drawn.draws) == 1)
        and s.scored is None
        and s.pooled is None
        and s.token_type_ids is None
    )
