"""A Batch's plain values to tensors, through the model, to tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import Batch, ScheduledSequence, StepResult, TokenLogprobs
from quire.common.params import LogprobsMode
from quire.models.base import CausalLM
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors, LayerKVCache
from quire.runner.decode_graphs import DecodeGraphs
from quire.runner.sampling.sampler import Sampler
from quire.runner.sampling.scoring import score


class ModelRunner:
    """Has the model and the layers' caches; keeps nothing of a step after it but the memory it computed in."""

    def __init__(
        self,
        model: CausalLM,
        kv: Sequence[LayerKVCache],
        block_size: int,
        max_model_len: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.model = model
        self.kv = kv
        self.block_size = block_size
        self._workspace = kernels.backend_of(kv[0].k).workspace()
        self._graphs = DecodeGraphs(model, kv, block_size, -(-max_model_len // block_size), self._workspace)
        self._sampler = Sampler(logprobs_mode)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """The tokens drawn, one for each draw, in batch order, and the log-probabilities wanted."""
        sequences = batch.sequences
        if not sequences:
            return StepResult(())
        scored: Mapping[int, TokenLogprobs] = {}
        with self._workspace:
            if self._graphs.take(sequences):
                logits: Tensor | None = self._graphs.logits(sequences)
            else:
                logits, scored = self._logits(sequences)
        drawn = StepResult(()) if logits is None else self._sampler.sample(logits, sequences)
        return replace(drawn, scored=scored) if scored else drawn

    def _logits(self, sequences: Sequence[ScheduledSequence]) -> tuple[Tensor | None, Mapping[int, TokenLogprobs]]:
        """Of the draws: [num_draws, vocab] float32, or None where nothing is drawn. And what is scored."""
        tensors = build_tensors(sequences, self.block_size)
        hidden = self.model(tensors, self.kv)  # [num_tokens, hidden]

        def compute_logits(rows: Tensor) -> Tensor:
            # Rows are gathered by our own kernel: torch's indexing would wake a second pool of threads on the same
            # cores.
            return self.model.compute_logits(kernels.embedding(rows, hidden))

        scored = score(sequences, tensors.query_start.tolist(), compute_logits)
        return compute_logits(tensors.logit_rows) if len(tensors.logit_rows) else None, scored


def build_tensors(sequences: Sequence[ScheduledSequence], block_size: int) -> BatchTensors:
    """The tokens of all sequences one after another, their positions and slots, and which rows want logits."""
    lens = np.array([len(s.token_ids) for s in sequences])
    starts = np.array([s.start for s in sequences])
    query_start = np.concatenate(([0], np.cumsum(lens)))
    token_ids = np.fromiter((t for s in sequences for t in s.token_ids), np.int64, query_start[-1])
    row_of = np.repeat(np.arange(len(sequences)), lens)  # [num_tokens]: which sequence a token belongs to
    positions = np.arange(query_start[-1]) - query_start[row_of] + starts[row_of]
    num_groups = len(sequences[0].block_tables)
    return BatchTensors(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        seq_lens=torch.from_numpy((starts + lens).astype(np.int32)),
        groups=tuple(_group_tensors(sequences, g, row_of, positions, block_size) for g in range(num_groups)),
        logit_rows=_logit_rows(sequences, query_start),
    )


def _group_tensors(
    sequences: Sequence[ScheduledSequence], group: int, row_of: np.ndarray, positions: np.ndarray, block_size: int
) -> GroupTensors:
    tables = [s.block_tables[group] for s in sequences]
    block_tables = np.zeros((len(tables), max(len(t) for t in tables)), np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    slots = block_tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return GroupTensors(torch.from_numpy(slots), torch.from_numpy(block_tables))


def _logit_rows(sequences: Sequence[ScheduledSequence], query_start: np.ndarray) -> Tensor:
    """The last token of every sequence, as often as it draws."""
    return torch.tensor([query_start[i + 1] - 1 for i, s in enumerate(sequences) for _ in s.draws], dtype=torch.int64)
