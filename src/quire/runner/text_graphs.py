"""Steps of one short text through an encoder, recorded once for each number of tokens, then replayed.

Most of the time of such a step is Python's between the kernels. What the pooler makes of the text is recorded too,
where it uses kernels alone.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import Pooled, PooledRows, PoolSpec, ScheduledSequence, StepResult
from quire.models.base import PoolingModel
from quire.models.layers.batch_tensors import BatchTensors
from quire.runner.pooling import PooledReader

MAX_TOKENS = 64
"""Of a text; a longer one takes so long that Python's share no longer matters."""
MAX_RECORDINGS = 256
"""Recordings that are kept, the last used ones, since requests may want embeddings of many sizes."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: kernels.KernelGraph
    tensors: BatchTensors
    hidden: Tensor
    """[num_tokens, hidden], where a replay writes it. The memory is shared with other computations."""
    vector: Pooled | None
    """What a replay makes of it, in such memory; None if the pooler is called instead."""


class TextGraphs:
    """The recordings, which the backend and the model must be able to make, and the token ids that they share."""

    def __init__(
        self, model: PoolingModel, read: PooledReader, backend: kernels.Backend, workspace: kernels.Workspace
    ) -> None:
        """The model has no cache. `read` has its pooler."""
        self._model = model
        self._read = read
        self._backend = backend
        self._workspace = workspace
        self._token_ids = np.zeros(MAX_TOKENS, np.int64)
        self._recorded: OrderedDict[tuple[int, PoolSpec | None], _Recorded] = OrderedDict()

    def can_replay(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether the step is one short text, without an adapter, that is not the second of a pair."""
        first = sequences[0]
        return (
            len(sequences) == 1
            and len(first.token_ids) <= MAX_TOKENS
            and first.token_type_ids is None
            and first.adapter == -1
        )

    def run(self, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """What is made of the text."""
        (text,) = sequences
        num_tokens = len(text.token_ids)
        self._token_ids[:num_tokens] = text.token_ids
        with self._workspace:
            recorded = self._replayed(num_tokens, self._recorded_spec(text.pooled, num_tokens))
            if recorded.vector is None:
                with torch.inference_mode():
                    return self._read(recorded.hidden.clone(), recorded.tensors, sequences)
            vector = recorded.vector
            return self._read.result(sequences, lambda *_: vector)

    def _recorded_spec(self, wanted: PooledRows | None, num_tokens: int) -> PoolSpec | None:
        """What the recording makes of all rows of the text; None for nothing."""
        if wanted is None or wanted.num_rows < num_tokens or not self._read.pooler.can_record(wanted.spec):
            return None
        return wanted.spec

    def _replayed(self, num_tokens: int, spec: PoolSpec | None) -> _Recorded:
        recorded = self._recorded.get((num_tokens, spec))
        if recorded is None:
            recorded = self._recorded[num_tokens, spec] = self._record(num_tokens, spec)
            if len(self._recorded) > MAX_RECORDINGS:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end((num_tokens, spec))
            recorded.graph.replay()
        return recorded

    @torch.inference_mode()
    def _record(self, num_tokens: int, spec: PoolSpec | None) -> _Recorded:
        """Run the step, and keep what it ran."""
        tensors = BatchTensors(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]),
            positions=torch.arange(num_tokens),
            query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            groups=(),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )
        graph, vector = self._backend.graph(), None
        with self._workspace.recording(joins_norms=True), graph.record():
            hidden = self._model(tensors, ())
            if spec is not None:
                vector = kernels.borrowed(self._model.pooler.pool(hidden, (), spec)).numpy()
        return _Recorded(graph, tensors, kernels.borrowed(hidden), vector)
