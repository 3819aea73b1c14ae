"""Steps of one short text through an encoder, recorded once for each number of tokens, then replayed.

Most of the time of such a step is Python's between the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import ScheduledSequence
from quire.models.base import PoolingModel
from quire.models.layers.batch_tensors import BatchTensors

MAX_TOKENS = 64
"""Of a text; a longer one takes so long that Python's share no longer matters."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: kernels.KernelGraph
    tensors: BatchTensors
    hidden: Tensor
    """[num_tokens, hidden], where a replay writes it. The memory is shared with other computations."""


class TextGraphs:
    """The recordings, which the backend and the model must be able to make, and the token ids that they share."""

    def __init__(self, model: PoolingModel, backend: kernels.Backend, workspace: kernels.Workspace) -> None:
        """The model has no cache."""
        self._model = model
        self._backend = backend
        self._workspace = workspace
        self._token_ids = np.zeros(MAX_TOKENS, np.int64)
        self._recorded: dict[int, _Recorded] = {}

    def can_replay(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether the step is one short text, without an adapter, that is not the second of a pair."""
        first = sequences[0]
        return (
            len(sequences) == 1
            and len(first.token_ids) <= MAX_TOKENS
            and first.token_type_ids is None
            and first.adapter == -1
        )

    def hidden(self, sequences: Sequence[ScheduledSequence]) -> tuple[Tensor, BatchTensors]:
        """[num_tokens, hidden], and the inputs that it is made of."""
        token_ids = sequences[0].token_ids
        self._token_ids[: len(token_ids)] = token_ids
        recorded = self._recorded.get(len(token_ids))
        if recorded is None:
            recorded = self._recorded[len(token_ids)] = self._record(len(token_ids))
        else:
            recorded.graph.replay()
        return recorded.hidden.clone(), recorded.tensors

    def _record(self, num_tokens: int) -> _Recorded:
        """Run the step, and keep what it ran."""
        tensors = BatchTensors(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]),
            positions=torch.arange(num_tokens),
            query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            groups=(),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )
        graph = self._backend.graph()
        with self._workspace.recording(), graph.record():
            hidden = self._model(tensors, ())
        return _Recorded(graph, tensors, kernels.borrowed(hidden))
