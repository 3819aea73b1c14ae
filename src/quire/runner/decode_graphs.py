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
from quire.kernels.backends.reference_backend import TorchThreads
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors, LayerCache
from quire.runner.row_layout import RowLayout, row_layout

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

    def __call__(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Any:
        """As `Model.forward`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As of CausalLM."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: kernels.KernelGraph
    logits: Tensor | None
    """[num_logits, vocab] float32, where a replay writes them. The memory is shared with other computations."""


class DecodeGraphs:
    """The recordings, which the backend must be able to make, and the inputs they share: the first rows of arrays that
    stay in place."""

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
        self._token_ids = np.zeros(MAX_ROWS, np.int64)
        self._positions = np.zeros(MAX_ROWS, np.int64)
        self._every_row = np.arange(MAX_ROWS)
        self._some_rows = np.zeros(MAX_ROWS, np.int64)
        self._query_start = np.zeros(MAX_ROWS + 1, np.int32)
        self._seq_lens = np.zeros(MAX_ROWS, np.int32)
        self._adapters = np.full(MAX_ROWS, -1, np.int64)
        self._slots = np.zeros((num_groups, MAX_ROWS), np.int64)
        self._block_tables = np.zeros((num_groups, MAX_ROWS, max_blocks), np.int32)
        self._known_tables: list[list[BlockIds | None]] = [[None] * MAX_ROWS for _ in range(num_groups)]
        self._recorded: OrderedDict[tuple[int, bool, int | None], _Recorded] = OrderedDict()

    def can_replay(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether backend and model can be recorded, and this is a step that is small enough.

        What torch computes keeps memory in each recording: with it, only decode steps are, which have few shapes.
        """
        if not (self._backend.can_record and self._model.can_record and is_small_step(sequences)):
            return False
        return not self._model.needs_torch or sum(map(_num_read, sequences)) == sum(len(s.token_ids) for s in sequences)

    def logits(self, sequences: Sequence[ScheduledSequence]) -> Tensor | None:
        """[num_read, vocab] float32 of the rows that are read, valid until the next step; None if none is read. The
        sequences may have any rows, MAX_ROWS in all, and one draw for each that is read."""
        layout = row_layout(sequences)
        num_rows, num_read = len(layout.token_ids), sum(map(_num_read, sequences))
        if num_read in (0, num_rows):
            return self._replayed(sequences, layout, None if num_read else 0)
        num_logits = min(num_rows, 1 << (num_read - 1).bit_length())  # more are computed, and fewer numbers recorded
        self._some_rows[:num_logits] = (*layout.read_rows(sequences), *repeat(0, num_logits - num_read))
        logits = self._replayed(sequences, layout, num_logits)
        return None if logits is None else logits[:num_read]

    def advance(self, sequences: Sequence[ScheduledSequence]) -> None:
        """As `logits`, in a stage that has no logits."""
        self._replayed(sequences, row_layout(sequences), 0)

    def _replayed(
        self, sequences: Sequence[ScheduledSequence], layout: RowLayout, num_logits: int | None
    ) -> Tensor | None:
        """The logits of the first `num_logits` of `_some_rows`, or of every row."""
        self._fill(sequences, layout)
        shape = len(layout.token_ids), layout.adapters is not None, num_logits
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._recorded[shape] = self._record(*shape)
            if len(self._recorded) > MAX_RECORDINGS:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(shape)
            with self._torch_threads():
                recorded.graph.replay()
        return recorded.logits

    def _fill(self, sequences: Sequence[ScheduledSequence], layout: RowLayout) -> None:
        num_seqs, num_rows = len(sequences), len(layout.token_ids)
        self._token_ids[:num_rows] = layout.token_ids
        self._positions[:num_rows] = layout.positions
        self._query_start[: num_seqs + 1] = layout.query_start
        self._query_start[num_seqs + 1 : num_rows + 1] = num_rows
        self._seq_lens[:num_seqs] = layout.seq_lens
        self._seq_lens[num_seqs:num_rows] = 0
        if layout.adapters is not None:
            self._adapters[:num_rows] = layout.adapters
        for group, known in enumerate(self._known_tables):
            tables = self._block_tables[group]
            for place, s in enumerate(sequences):
                table = s.block_tables[group]
                if table is not known[place]:  # a table that has changed is a new array
                    tables[place, : len(table)] = table
                    known[place] = table
            self._slots[group, :num_rows] = layout.slots(tables, self._block_size)

    def _record(self, num_rows: int, has_adapters: bool, num_logits: int | None) -> _Recorded:
        """Run the step, and keep what it ran."""
        graph, logits = self._backend.graph(), None
        with self._workspace.recording(), graph.record(with_torch=self._model.needs_torch):
            tensors = self._tensors(num_rows, has_adapters, num_logits)
            hidden = self._model(tensors, self._kv)  # [num_rows, hidden]
            if num_logits is not None:
                hidden = kernels.embedding(tensors.logit_rows, hidden)
            if len(hidden):
                logits = kernels.borrowed(self._model.compute_logits(hidden))
        return _Recorded(graph, logits)

    def _tensors(self, num_rows: int, has_adapters: bool, num_logits: int | None) -> BatchTensors:
        def first(array: np.ndarray, count: int) -> Tensor:
            return torch.from_numpy(array[:count])

        return BatchTensors(
            token_ids=first(self._token_ids, num_rows),
            positions=first(self._positions, num_rows),
            query_start=first(self._query_start, num_rows + 1),
            seq_lens=first(self._seq_lens, num_rows),
            groups=tuple(
                GroupTensors(first(slots, num_rows), first(tables, num_rows))
                for slots, tables in zip(self._slots, self._block_tables, strict=True)
            ),
            logit_rows=first(self._every_row, num_rows) if num_logits is None else first(self._some_rows, num_logits),
            adapters=first(self._adapters, num_rows) if has_adapters else None,
        )


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


def _num_read(s: ScheduledSequence) -> int:
    return 0 if s.drawn is None else s.drawn.num_rows
