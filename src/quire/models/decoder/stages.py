"""The pass over a decoder that leaves it some of its layers: a stage of a pipeline (Huang et al. 2019, GPipe).

The first stage keeps what is before the layers, and the last one what is behind them. Between two stages x and residual
cross as they are, so that every kernel reads what it would read in one process, and all bits are the same (ADR 0085).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quire.common.errors import UnsupportedModelError
from quire.config.parallel import Range
from quire.models.base import Model
from quire.models.decoder.model import Boundary, Decoder, Enter
from quire.models.decoder.watch import Watch
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.embedding import TiedLmHead

_BEFORE = ("project_in", "embed_positions", "embed_norm")
_BEHIND = ("norm", "project_out", "lm_head")


def keep_layers(model: Model, layers: Range) -> None:
    """Drop the other layers and what belongs to other stages, before weights are loaded. Layers keep their names.

    Raises UnsupportedModelError for a model that cannot be divided.
    """
    if not isinstance(model, Decoder) or model.needs_torch:
        raise UnsupportedModelError(
            f"pipeline_parallel_size: a {type(model).__name__} cannot be divided into stages; leave it at 1"
        )
    (first, end), num_layers = layers, len(model.layers)
    is_first, is_last = first == 0, end == num_layers
    model.boundaries = before, _ = boundary(model, first), boundary(model, end)
    model.passes = model.passes[first:end]
    for number in range(num_layers):
        if not first <= number < end:
            model.layers[number] = nn.Identity()
    is_tied = isinstance(model.lm_head, TiedLmHead)
    if not is_first:
        _drop(model, *_BEFORE)
        model.enter = _entering_with_anything(before)
        if not (is_last and is_tied):
            _drop(model, "embed_tokens")
    if not is_last:
        # A tied head has no weights of its own, and lets ranks divide the table as one process's ranks do.
        _drop(model, *(name for name in _BEHIND if not (name == "lm_head" and is_first and is_tied)))
        model.leave = lambda x, residual, batch: residual
        model.can_narrow = False


def boundary(model: Decoder, layer: int) -> Boundary:
    """What the layer of this number gets of the one before it."""
    of_end = model.boundaries[0]
    if layer in (0, len(model.layers)):
        return of_end
    return Boundary(1 + bool(model.layers[layer - 1].returns_x), of_end.width, of_end.dtype)


def _drop(model: Decoder, *names: str) -> None:
    for name in names:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _entering_with_anything(boundary: Boundary) -> Enter:
    """Enters with memory that nothing has written to, until StageStates take its place: for the memory plan."""

    def enter(batch: BatchTensors) -> tuple[Tensor | None, Tensor]:
        rows, device = len(batch.positions), batch.positions.device
        shape = (boundary.num_tensors, rows, boundary.width)
        residual, *x = torch.empty(shape, dtype=boundary.dtype, device=device)
        return (x[0] if x else None), residual

    return enter


class StageStates:
    """What a stage's layers get from the stage before, and what they give to the next one. Both always lie in the same
    memory, so that recorded steps read and write it."""

    def __init__(self, model: Decoder, num_tokens: int) -> None:
        """From now on the model's passes, of at most `num_tokens` tokens, read and write these states."""
        self.before, self.behind = model.boundaries
        self._num_tokens, self._num_kept = num_tokens, 0
        self._given = [
            torch.zeros(num_tokens, self.before.width, dtype=self.before.dtype) for _ in range(self.before.num_tensors)
        ]
        self._kept = [Watch(self.behind.width, self.behind.dtype, num_tokens) for _ in range(self.behind.num_tensors)]
        if self._given:
            model.enter = self._enter
        if self._kept:
            model.leave = self._leave

    @property
    def passes_on(self) -> bool:
        """Whether another stage follows."""
        return bool(self._kept)

    def _enter(self, batch: BatchTensors) -> tuple[Tensor | None, Tensor]:
        residual, *x = [rows[: len(batch.positions)] for rows in self._given]
        return (x[0] if x else None), residual

    def _leave(self, x: Tensor | None, residual: Tensor, batch: BatchTensors) -> Tensor:
        for kept, rows in zip(self._kept, (residual, x), strict=False):
            assert rows is not None
            kept.keep(rows)
        return residual

    def put(self, rows: Sequence[bytes | memoryview], num_rows: int) -> None:
        """Write what the stage before has given for a step of this number of rows. Raises ValueError if it is not
        that."""
        wanted = [num_rows * self.before.row_bytes] * self.before.num_tensors
        if num_rows > self._num_tokens or [len(each) for each in rows] != wanted:
            raise ValueError(
                f"states of {[len(each) for each in rows]} bytes for {num_rows} tokens, of at most {self._num_tokens}, "
                f"that need {wanted}"
            )
        self._num_kept = num_rows
        for target, given in zip(self._given, rows, strict=True):
            _bytes_of(target)[: len(given)] = np.frombuffer(given, np.uint8)

    def take(self) -> list[memoryview]:
        """What the next stage gets for the rows of the latest step, valid until the next one."""
        return [_bytes_of(kept.rows[: self._num_kept]).data for kept in self._kept]


def _bytes_of(rows: Tensor) -> np.ndarray:
    return rows.view(torch.uint8).numpy().reshape(-1)
