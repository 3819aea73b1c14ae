"""What the model's pooler makes of the hidden states of a step."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from quire.common.batch import Pooled, PooledRows, ScheduledSequence, StepResult
from quire.common.errors import CheckpointError, check_choice
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.common.params import PoolerInfo
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.pooling.pooler import Pooler


class _NotFiniteError(ArithmeticError):
    """A pooled vector has values that are NaN or infinite."""


class PooledReader:
    """Reads the rows that are to be pooled. A failure in the work for one sequence is reported for that one only."""

    def __init__(self, pooler: Pooler) -> None:
        self.pooler = pooler

    def least(self, sequences: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
        """The same, without rows to be pooled that the pooler does not read."""
        return [s if s.pooled is None else replace(s, pooled=self._least(s.pooled)) for s in sequences]

    def _least(self, wanted: PooledRows) -> PooledRows:
        reads = self.pooler.reads(wanted.spec.task)
        if reads == "all":
            return wanted
        return PooledRows(wanted.row if reads == "first" else wanted.row + wanted.num_rows - 1, 1, wanted.spec)

    def __call__(self, hidden: Tensor, tensors: BatchTensors, sequences: Sequence[ScheduledSequence]) -> StepResult:
        """hidden [num_read, hidden] of the step's tensors -> what was made of the rows of each sequence."""
        starts = tensors.first_rows

        def pool(place: int, wanted: PooledRows) -> Pooled:
            start, end = wanted.row, wanted.row + wanted.num_rows
            rows = hidden[starts[place] + start : starts[place] + end]  # [num_rows, hidden]
            vectors: Pooled = self.pooler.pool(rows, sequences[place].token_ids[start:end], wanted.spec).numpy()
            return vectors

        return self.result(sequences, pool)

    def result(self, sequences: Sequence[ScheduledSequence], pool: Callable[[int, PooledRows], Pooled]) -> StepResult:
        """Copies of what `pool` gives for the sequence at each place."""
        pooled: dict[int, Pooled] = {}
        errors: dict[int, str] = {}
        for place, scheduled in enumerate(sequences):
            if scheduled.pooled is None:
                continue
            try:
                fault_point("pool.sequence", scheduled.seq_id)
                pooled[place] = _copied(pool(place, scheduled.pooled))
            except _NotFiniteError as error:
                errors[place] = str(error)
            except Exception as error:
                logger.error("pooling failed", exc_info=error)
                errors[place] = f"its hidden states could not be pooled: {type(error).__name__}"
        return StepResult((), pooled=pooled, pool_errors=errors)


def _copied(vectors: Pooled) -> Pooled:
    """A copy, since they may lie in memory that the next step uses. Raises _NotFiniteError."""
    copied = vectors.copy()
    # The sum is finite only if all are; a sum of finite values may overflow. Of squares it takes half as long.
    total = copied.dot(copied) if copied.ndim == 1 else np.add.reduce(copied, axis=None)
    if not (math.isfinite(total) or np.isfinite(copied).all()):
        raise _NotFiniteError("the model gave values that are not finite (NaN or infinity); check its weights")
    return copied


def pooler_info(pooler: Pooler, model: ModelConfig, max_whole_tokens: int, *, keeps_nothing: bool) -> PoolerInfo:
    """What the pooler can make, for the checks of requests. `keeps_nothing`: the model's layers have no cache, so that
    no text can be computed in pieces, whichever of its hidden states the pooler needs. Raises ConfigError if the caller
    chose a task that the model does not have."""
    first = model.pooler_config.task or pooler.tasks[0]
    check_choice("pooler_config: task", first, pooler.tasks)
    return PoolerInfo(
        tasks=(first, *(task for task in pooler.tasks if task != first)),
        whole_tasks=tuple([task for task in pooler.tasks if keeps_nothing or pooler.reads(task) != "last"]),
        max_whole_tokens=max_whole_tokens,
        dimensions=pooler.dimensions,
        matryoshka=_matryoshka(model.hf_config),
        use_activation=model.pooler_config.use_activation,
    )


def _matryoshka(hf: HFConfig) -> tuple[int, ...] | None:
    """The smaller sizes of embeddings that config.json allows: those listed, or any; None for none."""
    listed = hf.get("matryoshka_dimensions")
    if listed is None:
        return () if hf.get("is_matryoshka") else None
    if not isinstance(listed, list) or not all(type(size) is int and size > 0 for size in listed):
        raise CheckpointError(f"{hf.source}: 'matryoshka_dimensions' is {listed!r}, but must be a list of sizes")
    return tuple(listed)
