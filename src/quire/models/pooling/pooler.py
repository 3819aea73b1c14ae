"""What makes vectors of a model's hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.batch import PoolSpec
from quire.common.params import PoolingTask
from quire.config.checkpoint.sentence_transformers import DenseModule, SentenceModules
from quire.models.layers.norm import LayerNorm, NormShape
from quire.models.pooling.heads import ACTIVATIONS, ActivatedDense, Dense, Head, HeadShape

Reads = Literal["all", "first", "last"]
_NORM_EPS = 1e-24


class Pooler(nn.Module, ABC):
    """Makes an embedding, scores, or a vector for each token of the hidden states of one sequence."""

    tasks: tuple[PoolingTask, ...]
    """What it can make; the first is made unless another is asked for."""
    dimensions: int | None
    """Number of elements of an embedding; None if it makes none."""

    @abstractmethod
    def reads(self, task: str) -> Reads:
        """Of which of its rows `pool` makes it."""

    @abstractmethod
    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        """hidden [num_rows, hidden], token_ids [num_rows] -> [size], or [num_rows, size] for tasks of tokens; float32.

        It depends on these rows alone. It is valid until the next step.
        """

    def can_record(self, spec: PoolSpec) -> bool:
        """Whether `pool` makes this with kernels alone, whatever the tokens are."""
        return False


class EmbeddingPooler(Pooler):
    """Embeddings of texts, and of each token."""

    def __init__(self, modules: SentenceModules, hidden_size: int) -> None:
        super().__init__()
        self._modes, self._normalizes = modules.modes, modules.normalizes
        self.tasks = ("embed", "token_embed") if modules.modes else ("token_embed",)
        self.steps = nn.ModuleList()
        self._is_recordable = len(modules.modes) == 1 and not modules.steps
        width = hidden_size * max(1, len(modules.modes))
        self._fits_tokens = width == hidden_size
        for step in modules.steps:
            if isinstance(step, DenseModule):
                sizes = step.in_features, step.out_features
                self.steps.append(ActivatedDense(*sizes, step.activation, bias=step.has_bias))
                width = step.out_features
            else:
                self.steps.append(LayerNorm(step.width, NormShape(1e-5, is_rms=False, has_bias=True)))
        self.dimensions = width

    def reads(self, task: str) -> Reads:
        return "all" if task == "token_embed" else _reads(self._modes)

    def can_record(self, spec: PoolSpec) -> bool:
        return spec.task == "embed" and self._is_recordable

    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        is_of_tokens = spec.task == "token_embed"
        rows = hidden.float() if is_of_tokens else self._joined(hidden)  # [num_rows, hidden] or [1, joined]
        if not is_of_tokens or self._fits_tokens:
            for step in self.steps:
                rows = step(rows)
        rows = _cut_and_scaled(rows, spec, normalizes=self._normalizes)
        return rows if is_of_tokens else rows[0]

    def _joined(self, hidden: Tensor) -> Tensor:
        pooled = [pool_row(hidden, mode) for mode in self._modes]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


class MultiEmbeddingPooler(EmbeddingPooler):
    """Embeddings as others, and for each token a vector and a weight, of projections of their own: those of BGE-M3
    (Chen et al. 2024). The first token of the text has neither, nor has the last a weight, if they are special."""

    def __init__(
        self,
        modules: SentenceModules,
        hidden_size: int,
        vectors: DenseModule,
        weights: DenseModule,
        first_ids: frozenset[int],
        last_ids: frozenset[int],
    ) -> None:
        """`first_ids` and `last_ids`: the special tokens at the ends of texts."""
        super().__init__(modules, hidden_size)
        self.tasks = ("embed", "token_embed", "token_classify")
        self.colbert_linear = Dense(hidden_size, vectors.out_features, bias=vectors.has_bias)
        self.sparse_linear = Dense(hidden_size, weights.out_features, bias=weights.has_bias)
        self._first_ids, self._last_ids = first_ids, last_ids

    def reads(self, task: str) -> Reads:
        return "all" if task == "token_classify" else super().reads(task)

    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        if spec.task == "embed":
            return super().pool(hidden, token_ids, spec)
        start, end = int(token_ids[0] in self._first_ids), len(token_ids)
        if spec.task == "token_embed":
            vectors: Tensor = self.colbert_linear(hidden[start:].float())
            return _cut_and_scaled(vectors, spec, normalizes=True)
        end -= end > start and token_ids[-1] in self._last_ids
        weights: Tensor = self.sparse_linear(hidden[start:end].float())
        return ACTIVATIONS["relu" if spec.activation in (None, True) else None](weights)


class ScorePooler(EmbeddingPooler):
    """Classes or scores of texts: what would be their embedding are logits."""

    def __init__(self, modules: SentenceModules, hidden_size: int, activation: str | None) -> None:
        """`activation`: what makes probabilities of logits."""
        super().__init__(modules, hidden_size)
        self.tasks = ("classify", "score") if self.dimensions == 1 else ("classify",)
        self.dimensions = None
        self._activation = ACTIVATIONS[activation]

    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        logits = super().pool(hidden, token_ids, spec)
        return self._activation(logits[None])[0] if spec.activation in (None, True) else logits


class ClassPooler(Pooler):
    """Classes or scores of texts, or of each token."""

    def __init__(
        self,
        shape: HeadShape,
        hidden_size: int,
        num_labels: int,
        activation: str | None,
        *,
        of_tokens: bool,
        out: Dense | None = None,
    ) -> None:
        """`activation`: what makes probabilities of logits. `out`: the last layer, if it is not an ordinary one."""
        super().__init__()
        self.dimensions = None
        score: tuple[PoolingTask, ...] = ("score",) if num_labels == 1 else ()
        self.tasks = ("token_classify",) if of_tokens else ("classify", *score)
        self.head = Head(shape, hidden_size, num_labels, out)
        self._mode = shape.mode
        self._activation = ACTIVATIONS[activation]

    def reads(self, task: str) -> Reads:
        return "all" if task == "token_classify" else _reads([self._mode])

    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        is_of_tokens = spec.task == "token_classify"
        logits = self.head(hidden.float() if is_of_tokens else pool_row(hidden, self._mode))
        values = self._activation(logits) if spec.activation in (None, True) else logits
        return values if is_of_tokens else values[0]


def _reads(modes: Sequence[str]) -> Reads:
    """Of which rows `pool_row` makes rows in these modes."""
    for only in ("first", "last"):
        if all(mode == only for mode in modes):
            return only
    return "all"


def pool_row(hidden: Tensor, mode: str) -> Tensor:
    """One row [1, hidden] float32 of hidden [num_rows, hidden]: its `first` or `last`, or as kernels.pool_rows."""
    if mode == "first":
        hidden, mode = hidden[:1], "mean"
    if mode == "last":
        hidden, mode = hidden[-1:], "mean"
    return kernels.pool_rows(hidden, mode)[None]


def _cut_and_scaled(rows: Tensor, spec: PoolSpec, *, normalizes: bool) -> Tensor:
    """rows [num_rows, width] float32 as wide as the spec wants them, scaled if it says so, or else `normalizes`."""
    if spec.dimensions is not None:
        rows = rows[:, : spec.dimensions].contiguous()
    return normalized(rows) if (normalizes if spec.normalize is None else spec.normalize) else rows


def normalized(rows: Tensor) -> Tensor:
    """rows [num_rows, width] float32, each scaled to length 1; zeros stay zeros.

    It is a norm over the root mean square, whose weights make the root of a mean that of a sum.
    """
    return kernels.rms_norm(rows, _root_of_mean(rows.shape[1]).to(rows.device), _NORM_EPS)


@lru_cache(64)
def _root_of_mean(width: int) -> Tensor:
    return torch.from_numpy(np.full(width, width**-0.5, np.float32))
