"""A draft head: reads the hidden states of the rows that a step accepts, and drafts what may come next."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import Ahead, ScheduledSequence, StepResult
from quire.models.heads.head import DraftHead
from quire.models.layers.batch_tensors import LayerCache
from quire.runner.draft_runner import DraftRunner, Reading, accepted_tokens, drawn_as_draft
from quire.runner.model_runner import build_tensors


class HeadRunner(DraftRunner):
    """Runs a head as DraftRunner runs a draft model. What the head keeps of a token, in the token's slot, is made of
    the token's hidden state and the token behind it. So each step has all that the head needs of its rows, and nothing
    outlives the step but keys and values (ADR 0059)."""

    def __init__(
        self,
        head: DraftHead,
        kv: Sequence[LayerCache],
        block_size: int,
        *,
        states: Sequence[Tensor],
        targets: Sequence[int] | None,
        max_len: int,
        vocab_size: int,
        backend: kernels.Backend,
    ) -> None:
        """`states` are what the head reads of the model's latest step, row by row; `targets` are the model's tokens by
        those of the head, None if they are the same."""
        sizes = {"vocab_sizes": (vocab_size, vocab_size), "max_lens": (max_len, max_len)}
        super().__init__(head, kv, block_size, backend=backend, **sizes)
        self._head, self._states = head, states
        self._targets = None if targets is None else np.array(targets)
        self._hidden: Tensor | None = None
        """[num_tokens, width]: what the head has given in its latest pass of this step."""

    def run(self, sequences: Sequence[ScheduledSequence], result: StepResult) -> StepResult:
        """As DraftRunner."""
        self._hidden = None
        return super().run(sequences, result)

    def _to_read(self, s: ScheduledSequence, ahead: Ahead, drawn_ids: tuple[int, ...]) -> ScheduledSequence:
        """For each row that the step accepts, the token behind it."""
        drawn = None
        if s.drawn is None:
            token_ids = s.token_ids if ahead.following is None else (*s.token_ids, ahead.following)
        else:
            token_ids, history = accepted_tokens(s, drawn_ids)
            if ahead.num_drafts:
                drawn = drawn_as_draft(s.drawn, history, reduces=False)
        return ScheduledSequence(s.seq_id, token_ids[1:], s.start, s.block_tables, drawn)

    def _logits(self, readings: Sequence[Reading]) -> Tensor | None:
        lens = [len(reading.sequence.token_ids) for reading in readings]
        rows = [
            row
            for reading, count in zip(readings, lens, strict=True)
            for row in range(reading.row, reading.row + count)
        ]
        with self._workspace:
            tensors = build_tensors([reading.sequence for reading in readings], self._block_size)
            assert tensors.token_ids is not None
            embeddings, states = self._head.embed_tokens(tensors.token_ids), self._states_of(torch.tensor(rows))
            self._hidden = self._head(replace(tensors, embeddings=embeddings, states=states), self._kv)
            for reading, end in zip(readings, accumulate(lens), strict=True):
                reading.row = end - 1
            if not len(tensors.logit_rows):
                return None
            logits = self._head.compute_logits(kernels.embedding(tensors.logit_rows, self._hidden))
        return logits if self._targets is None else self._spread(logits)

    def _states_of(self, rows: Tensor) -> Tensor:
        """[num_rows, width]: the model's in the first pass of a step, and then the head's own."""
        if self._hidden is not None:
            return kernels.embedding(rows, self._hidden)
        return self._head.combine([kernels.embedding(rows, states) for states in self._states])

    def _spread(self, logits: Tensor) -> Tensor:
        """[num_rows, tokens of the head] -> [num_rows, vocab]: tokens that the head does not have cannot be drawn."""
        spread = np.full((len(logits), self._vocab_sizes[1]), -np.inf, np.float32)
        spread[:, self._targets] = logits.numpy()
        return torch.from_numpy(spread)
