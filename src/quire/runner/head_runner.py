"""A draft head: reads the hidden states of the rows that a step accepts, and drafts what may come next."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import Ahead, ScheduledSequence, StepResult
from quire.models.decoder.watch import Watch
from quire.models.heads.head import DraftHead
from quire.models.layers.batch_tensors import BatchTensors, LayerCache
from quire.runner.draft_runner import DraftRunner, Passes, Reading, accepted_tokens, drawn_as_draft


class StateReader:
    """A head that reads hidden states from the same memory in each pass, so that its passes can be recorded as a
    model's are."""

    can_record, needs_torch = True, False

    def __init__(
        self,
        head: DraftHead,
        states: Sequence[Tensor],
        combine: Callable[[Sequence[Tensor]], Tensor],
        rows: Tensor,
        given: Watch,
    ) -> None:
        """It reads those of `states` that `rows` names, a row for each token, and `combine` makes one of them; `given`
        keeps the head's own states of the rows whose logits are computed."""
        self._head, self._states, self._combine, self._rows, self._given = head, states, combine, rows, given
        self.can_narrow = head.can_narrow

    def __call__(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Tensor:
        """As `Model.forward`."""
        assert batch.token_ids is not None
        rows = self._rows[: len(batch.token_ids)]
        states = self._combine([kernels.embedding(rows, each) for each in self._states])
        hidden: Tensor = self._head(
            replace(batch, embeddings=self._head.embed_tokens(batch.token_ids), states=states), kv
        )
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As of CausalLM."""
        return self._head.compute_logits(self._given.keep(hidden))


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
        workspace, given = backend.workspace(), Watch(head.width, head.dtype, len(states[0]))
        self._rows = np.zeros(len(states[0]), np.int64)

        def passes(states: Sequence[Tensor], combine: Callable[[Sequence[Tensor]], Tensor]) -> Passes:
            reader = StateReader(head, states, combine, torch.from_numpy(self._rows), given)
            return Passes(reader, kv, block_size, max_len, backend, workspace)

        self._of_model = passes(states, head.combine)
        """Passes that read the model's states: the first of each step."""
        self._of_itself = passes([given.rows], lambda states: states[0])
        """Passes that read what the head gave in the pass before."""
        super().__init__(self._of_model, vocab_sizes=(vocab_size, vocab_size), max_len=max_len, backend=backend)
        self._is_first = True
        """Whether the next pass is the first of the step."""
        self._targets = None if targets is None else np.array(targets)
        self._spread_rows = np.zeros((0, vocab_size), np.float32)

    def run(self, sequences: Sequence[ScheduledSequence], result: StepResult) -> StepResult:
        """As DraftRunner."""
        self._is_first = True
        return super().run(sequences, result)

    def _to_read(self, s: ScheduledSequence, ahead: Ahead, drawn_ids: tuple[int, ...]) -> ScheduledSequence:
        """For each row that the step accepts, the token behind it."""
        drawn = None
        if s.drawn is None:
            token_ids = s.token_ids if ahead.following is None else (*s.token_ids, ahead.following)
        else:
            token_ids, history = accepted_tokens(s, drawn_ids)
            if ahead.num_drafts:
                drawn = drawn_as_draft(s.drawn, history, self._vocab_sizes[0])
        return ScheduledSequence(s.seq_id, token_ids[1:], s.start, s.block_tables, drawn)

    def _logits(self, readings: Sequence[Reading]) -> Tensor | None:
        rows = [row for r in readings for row in range(r.row, r.row + len(r.sequence.token_ids))]
        logits = self._logits_of([reading.sequence for reading in readings], rows, is_first=self._is_first)
        self._is_first = False
        return logits if logits is None or self._targets is None else self._spread(logits)

    def _logits_of(
        self, sequences: Sequence[ScheduledSequence], rows: Sequence[int], *, is_first: bool
    ) -> Tensor | None:
        """As DraftRunner, of a pass that reads these rows of hidden states."""
        self._passes = self._of_model if is_first else self._of_itself
        self._rows[: len(rows)] = rows
        return super()._logits_of(sequences, rows, is_first=is_first)

    def _spread(self, logits: Tensor) -> Tensor:
        """[num_rows, tokens of the head] -> [num_rows, vocab]: tokens that the head does not have cannot be drawn."""
        if len(self._spread_rows) < len(logits):
            self._spread_rows = np.full((len(logits), self._vocab_sizes[1]), -np.inf, np.float32)
        spread = self._spread_rows[: len(logits)]
        spread[:, self._targets] = logits.numpy()
        return torch.from_numpy(spread)
