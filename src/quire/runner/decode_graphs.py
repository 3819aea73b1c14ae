"""Decode steps, in which every sequence runs one token: recorded once for each number of them, then replayed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import BlockIds, ScheduledSequence
from quire.models.base import CausalLM
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors, LayerKVCache

MAX_SEQS = 256
"""a step of more is so long that Python no longer matters"""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: kernels.KernelGraph
    logits: Tensor
    """[num_seqs, vocab] float32: where a replay puts them; it does not hold that memory, others compute there too"""


class DecodeGraphs:
    """The graphs, and the inputs they share: the first rows of arrays that stay where they are."""

    def __init__(
        self,
        model: CausalLM,
        kv: Sequence[LayerKVCache],
        block_size: int,
        max_blocks: int,
        workspace: kernels.Workspace,
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._workspace = workspace
        num_groups = 1 + max(layer.group for layer in kv)
        self._token_ids = np.zeros(MAX_SEQS, np.int64)
        self._positions = np.zeros(MAX_SEQS, np.int64)
        self._rows = np.arange(MAX_SEQS + 1)
        self._query_start = self._rows.astype(np.int32)
        self._seq_lens = np.zeros(MAX_SEQS, np.int32)
        self._slots = np.zeros((num_groups, MAX_SEQS), np.int64)
        self._block_tables = np.zeros((num_groups, MAX_SEQS, max_blocks), np.int32)
        self._held: list[list[BlockIds | None]] = [[None] * MAX_SEQS for _ in range(num_groups)]
        self._recorded: dict[int, _Recorded] = {}

    @staticmethod
    def take(sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether these make a decode step."""
        return (
            kernels.backend_for("cpu").can_record
            and len(sequences) <= MAX_SEQS
            and all(len(s.token_ids) == 1 and len(s.draws) == 1 and s.scored is None for s in sequences)
        )

    def logits(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        """[num_seqs, vocab] float32, until the next step."""
        self._fill(sequences)
        num_seqs = len(sequences)
        recorded = self._recorded.get(num_seqs)
        if recorded is None:
            recorded = self._recorded[num_seqs] = self._record(num_seqs)
        else:
            recorded.graph.replay()
        return recorded.logits

    def _fill(self, sequences: Sequence[ScheduledSequence]) -> None:
        n, size = len(sequences), self._block_size
        self._token_ids[:n] = [s.token_ids[0] for s in sequences]
        positions = self._positions[:n]
        positions[:] = [s.start for s in sequences]
        self._seq_lens[:n] = positions + 1
        for group, held in enumerate(self._held):
            tables = self._block_tables[group]
            for row, s in enumerate(sequences):
                table = s.block_tables[group]
                if table is not held[row]:  # a table is a new one when it has changed
                    tables[row, : len(table)] = table
                    held[row] = table
            self._slots[group, :n] = tables[self._rows[:n], positions // size].astype(np.int64) * size
            self._slots[group, :n] += positions % size

    def _record(self, num_seqs: int) -> _Recorded:
        """Run the step, and keep what it ran."""
        graph = kernels.backend_of(self._kv[0].k).graph()
        with self._workspace.recording(), graph.record():
            hidden = self._model(self._tensors(num_seqs), self._kv)  # [num_seqs, hidden]
            logits = self._model.compute_logits(hidden)
        return _Recorded(graph, kernels.borrowed(logits))

    def _tensors(self, num_seqs: int) -> BatchTensors:
        def first(array: np.ndarray, count: int = num_seqs) -> Tensor:
            return torch.from_numpy(array[:count])

        return BatchTensors(
            token_ids=first(self._token_ids),
            positions=first(self._positions),
            query_start=first(self._query_start, num_seqs + 1),
            seq_lens=first(self._seq_lens),
            groups=tuple(
                GroupTensors(first(slots), first(tables))
                for slots, tables in zip(self._slots, self._block_tables, strict=True)
            ),
            logit_rows=first(self._rows),
        )
