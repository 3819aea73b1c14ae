"""What makes vectors of a model's hidden states."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.common.batch import PoolSpec
from quire.common.params import PoolingTask


class Pooler(Protocol):
    """Makes an embedding, scores, or a vector for each token of the hidden states of one sequence."""

    tasks: tuple[PoolingTask, ...]
    """What it can make; the first is made unless another is asked for."""
    dimensions: int | None
    """Number of elements of an embedding; None if it makes none."""

    def needs_all_rows(self, task: PoolingTask) -> bool:
        """Whether the hidden states of all tokens are needed, or those of the last alone."""
        ...

    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        """hidden [num_rows, hidden], token_ids [num_rows] -> [size], or [num_rows, size] for tasks of tokens."""
        ...
