"""A Batch's plain values to tensors, through the model, to tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from quire import kernels
from quire.common.batch import Batch, BlockIds, ScheduledSequence, StepResult
from quire.common.errors import ConfigError
from quire.common.params import LogprobsMode
from quire.models.adapters.slots import AdapterSlots
from quire.models.base import CausalLM, PoolingModel
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors, LayerCache, ReadRows, most_read
from quire.runner.decode_graphs import DecodeGraphs
from quire.runner.pooling import PooledReader
from quire.runner.row_layout import RowLayout, read_span, row_layout
from quire.runner.sampling.sampler import IdleSampler, Sampler
from quire.runner.text_graphs import TextGraphs

_RECORDED_WORK = 1 << 25
"""Rows times the squared width of hidden states, from which on recording a step takes less time than it saves."""


class ModelRunner:
    """Owns the model and the layers' caches. After a step it keeps nothing of it but the memory it computed in."""

    def __init__(
        self,
        model: CausalLM | PoolingModel,
        kv: Sequence[LayerCache],
        block_size: int,
        max_model_len: int,
        backend: kernels.Backend,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        adapters: AdapterSlots | None = None,
        *,
        ranks: kernels.Ranks | None = None,
        passes_on: bool = False,
    ) -> None:
        """`backend` is that of the model and of `kv`; `adapters` are the model's, whose slots sequences may name. Of
        several `ranks`, the first one returns what is drawn. A stage that `passes_on` hidden states computes no
        logits."""
        self.model = model
        self._adapters = adapters
        self.kv = kv
        self.block_size = block_size
        self._backend = backend
        self._workspace = backend.workspace()
        self._records = backend.can_record and model.can_record and not model.needs_torch
        self._width = 0  # of hidden states, once there are some
        is_first = ranks is None or ranks.shard.rank == 0
        self._sampler = Sampler(backend, logprobs_mode, ranks) if is_first else IdleSampler(ranks)
        self._graphs: DecodeGraphs | None = None
        self._texts: TextGraphs | None = None
        self._passes_on = passes_on
        self._read: LogitsReader | PooledReader
        if isinstance(model, PoolingModel):
            self._read = read = PooledReader(model.pooler)
            if not kv and self._records:
                self._texts = TextGraphs(model, read, backend, self._workspace)
        else:
            max_blocks = -(-max_model_len // block_size)
            self._graphs = DecodeGraphs(model, kv, block_size, max_blocks, backend, self._workspace)
            self._read = LogitsReader(model, self._sampler)

    def run(self, batch: Batch) -> StepResult:
        """The drawn tokens in batch order, or whatever else the sequences want of their rows."""
        sequences = batch.sequences
        if not sequences:
            return StepResult(())
        if self._texts is not None and self._texts.can_replay(sequences):
            return self._texts.run(sequences)
        self._check_adapters(sequences)
        with self._workspace, torch.inference_mode():
            if self._graphs is not None and self._graphs.can_replay(sequences):
                if self._passes_on:
                    self._graphs.advance(sequences)
                    return StepResult(())
                logits = self._graphs.logits(sequences)
                return StepResult(()) if logits is None else self._sampler.sample(logits, sequences)
            return self._call(sequences)

    def _check_adapters(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Raise ConfigError or CheckpointError if an adapter is not loaded: its rows would silently go without."""
        slots = {s.adapter for s in sequences} - {-1}
        if slots and self._adapters is None:
            raise ConfigError(f"adapters in slots {sorted(slots)} are asked for, but this worker was made without any")
        if slots and self._adapters is not None:
            self._adapters.check_loaded(slots)

    def _call(self, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """Call the model, and read the rows that the sequences want."""
        sequences = self._read.least(sequences)
        tensors = build_tensors(sequences, self.block_size, narrows=self.model.can_narrow)
        hidden = self._hidden(tensors)
        if self._passes_on:
            return StepResult(())
        return self._read(hidden, tensors, sequences)

    def _hidden(self, tensors: BatchTensors) -> Tensor:
        """[num_tokens, hidden] of the model. Kernels that take long run once all have been called, if they can be
        recorded: between them Python would find its objects gone from the caches, and threads asleep."""
        if self._records and tensors.positions.shape[-1] * self._width**2 >= _RECORDED_WORK:
            with self._workspace.recording(), self._backend.graph().record():
                hidden: Tensor = self.model(tensors, self.kv)
        else:
            hidden = self.model(tensors, self.kv)
        self._width = hidden.shape[-1]
        return hidden


class LogitsReader:
    """Reads the rows from whose logits tokens are drawn, or known tokens scored."""

    def __init__(self, model: CausalLM, sampler: Sampler | IdleSampler) -> None:
        self._model = model
        self._sampler = sampler

    def least(self, sequences: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
        """As PooledReader."""
        return sequences

    def __call__(self, hidden: Tensor, tensors: BatchTensors, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """hidden [num_read, hidden] of the step's tensors -> the tokens drawn and the log-probabilities."""

        def compute_logits(rows: Tensor) -> Tensor:
            # Rows are gathered by our own kernel: torch's indexing would wake a second pool of threads on the same
            # cores.
            return self._model.compute_logits(kernels.embedding(rows, hidden))

        scored = self._sampler.score(sequences, tensors.first_rows, compute_logits)
        drawn, rows = StepResult(()), tensors.of_hidden.logit_rows
        if len(rows):
            drawn = self._sampler.sample(compute_logits(rows), sequences)
        return replace(drawn, scored=scored) if scored else drawn


def build_tensors(sequences: Sequence[ScheduledSequence], block_size: int, *, narrows: bool = False) -> BatchTensors:
    """The tokens of all sequences one after another, their positions and slots, and which rows want logits. For a model
    that `narrows` its last layer, also the rows that are read, unless they are too many."""
    layout, spans = row_layout(sequences), list(map(read_span, sequences))
    tables = [_block_tables(sequences, group) for group in range(len(sequences[0].block_tables))]
    read = None
    if narrows and sum([end - first for first, end in spans]) <= most_read(len(layout.token_ids)):
        rows, part = layout.part(spans)
        first_rows = (part.query_start[:-1] - [first for first, _ in spans]).tolist()
        read = ReadRows(torch.from_numpy(rows), _tensors(sequences, part, tables, block_size), first_rows)
    return _tensors(sequences, layout, tables, block_size, read)


def _tensors(
    sequences: Sequence[ScheduledSequence],
    layout: RowLayout,
    tables: Sequence[BlockIds],
    block_size: int,
    read: ReadRows | None = None,
) -> BatchTensors:
    return BatchTensors(
        token_ids=torch.from_numpy(layout.token_ids),
        positions=torch.from_numpy(layout.positions),
        query_start=torch.from_numpy(layout.query_start.astype(np.int32)),
        seq_lens=torch.from_numpy(layout.seq_lens.astype(np.int32)),
        groups=tuple(_group_tensors(each, layout, block_size) for each in tables),
        logit_rows=torch.tensor(layout.read_rows(sequences), dtype=torch.int64),
        adapters=None if layout.adapters is None else torch.from_numpy(layout.adapters),
        token_type_ids=None if layout.token_type_ids is None else torch.from_numpy(layout.token_type_ids),
        read=read,
    )


def _block_tables(sequences: Sequence[ScheduledSequence], group: int) -> BlockIds:
    """[num_seqs, max_blocks], padded with 0."""
    tables = [s.block_tables[group] for s in sequences]
    padded = np.zeros((len(tables), max(len(t) for t in tables)), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


def _group_tensors(tables: BlockIds, layout: RowLayout, block_size: int) -> GroupTensors:
    # Without blocks the group's layers keep nothing.
    slots = layout.slots(tables, block_size) if tables.size else np.zeros(0, np.int64)
    return GroupTensors(torch.from_numpy(slots), torch.from_numpy(tables))
