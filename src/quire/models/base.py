"""What every model promises to the runner, the memory plan and the loader."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from quire.config.kv_cache import KVCacheSpec
from quire.config.model import ModelConfig
from quire.models.layers.batch_tensors import BatchTensors, LayerCache
from quire.models.layers.weighted_layer import WeightedLayer
from quire.models.pooling.pooler import Pooler
from quire.models.weights.stacked import Stack


class Model(nn.Module, ABC):
    """Hidden states from tokens. What is done with them is a subclass's (`CausalLM`) or the caller's business.

    The class methods work from the config alone, without weights or an instance. An instance is made without weights,
    and `load_model` fills its WeightedLayers; from then on it owns them and never changes.

    A new family: subclass, name the modules as the checkpoint does (after `renames`), state `fused`, register the
    architecture in `config/checkpoint/architectures.py`, add it to tests/models.
    """

    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(regular expression, replacement), applied one after the other to each name of the checkpoint."""
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Module here -> the checkpoint's modules whose weights it stacks."""
    ignored: ClassVar[tuple[str, ...]] = (
        r"\.rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$", r"^mtp(\.|_\w+\.\d)"
    )  # fmt: skip
    """Regular expressions of (renamed) tensors that are no weights: tables that old versions saved, and layers for
    multi-token prediction, which are a draft head's."""
    num_position_rows: ClassVar[int] = 1
    """1: `forward` takes positions [num_tokens]. More: [num_position_rows, num_tokens]."""

    can_record: ClassVar[bool] = True
    """Whether a forward pass can be recorded and replayed."""
    needs_torch: ClassVar[bool] = False
    """Whether a forward pass computes with torch too, on one thread, so that its recordings have to hold that."""
    num_logits_alive: ClassVar[int] = 1
    """How many tensors as large as its logits a model with a head has at once, at most."""

    can_narrow: bool = False
    """Whether `forward` takes batches that say which rows are read."""
    embed_tokens: nn.Module

    @classmethod
    @abstractmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        """What each layer keeps per token, one spec per layer. Raises CheckpointError if the config is malformed."""

    @classmethod
    def copies(cls, config: ModelConfig) -> Mapping[str, str]:
        """Names of tensors that a checkpoint may hold although another weight serves, and the name of that weight."""
        return {}

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        """The tensors of a checkpoint that hold what several modules here have, by its own names for them."""
        return ()

    @classmethod
    def folders(cls, config: ModelConfig) -> Mapping[str, Path]:
        """Folders or files of more weights, by what the names of their tensors are preceded by here."""
        return {}

    @abstractmethod
    def forward(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Tensor:
        """Hidden states of all tokens, or of those that the batch says are read: [num_tokens, hidden]. Writes the keys
        and values of all into `kv` (one per layer).

        Nothing else changes, but for the batch's embeddings, which are computed in place.
        """

    def embed(self, batch: BatchTensors) -> Tensor:
        """What the layers start from and write into: the batch's embeddings, or else its tokens' rows of the table."""
        rows: Tensor = self.embed_tokens(batch.token_ids) if batch.embeddings is None else batch.embeddings
        return rows  # [num_tokens, width of the table]

    def weight_name(self, checkpoint_name: str) -> str | None:
        """The model's name for a tensor of the checkpoint; None for one that is no weight."""
        name = checkpoint_name
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return None if any(re.search(pattern, name) for pattern in self.ignored) else name

    def weighted_layers(self) -> list[tuple[str, WeightedLayer]]:
        """Every layer with weights, once, by its name in the model."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, WeightedLayer)]


class CausalLM(Model):
    """A decoder with a language model head."""

    lm_head: nn.Module

    @classmethod
    @abstractmethod
    def ties_embeddings(cls, config: ModelConfig) -> bool:
        """Whether the head uses the token table, and has no weights of its own."""

    @classmethod
    def copies(cls, config: ModelConfig) -> Mapping[str, str]:
        return {"lm_head.weight": "embed_tokens.weight"} if cls.ties_embeddings(config) else {}

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> logits [num_rows, vocab] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class PoolingModel(Model):
    """A model whose hidden states are pooled into embeddings, scores or classes. It has no language model head."""

    pooler: Pooler
