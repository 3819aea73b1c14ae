"""What every model promises to the runner, the memory plan and the loader."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from quire.config.kv_cache import KVCacheSpec
from quire.config.model import ModelConfig
from quire.models.layers.batch_tensors import BatchTensors, LayerKVCache
from quire.models.layers.weighted_layer import WeightedLayer


class CausalLM(nn.Module, ABC):
    """A decoder with a language model head.

    The class methods work from the config alone: no weights, no instance. An instance is made without weights,
    `load_model` fills its WeightedLayers; from then on it owns them and never changes. `forward` and `compute_logits`
    change nothing but the KV cache they are given.

    A new family: subclass, name the modules as the checkpoint does (after `renames`), state `fused`, register the
    architecture in `registry.py`, add it to tests/models.
    """

    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(regular expression, replacement), applied in turn to each name of the checkpoint"""
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """module here -> the checkpoint's modules whose weights it stacks"""
    ignored: ClassVar[tuple[str, ...]] = (r"\.rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$")
    """regular expressions of (renamed) tensors that are no weights: tables that old versions saved"""

    embed_tokens: nn.Module
    lm_head: nn.Module

    @classmethod
    @abstractmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        """What each layer keeps per token, one spec per layer. Raises CheckpointError where the config is malformed."""

    @classmethod
    @abstractmethod
    def activation_width(cls, config: ModelConfig) -> int:
        """Elements (of config.dtype) alive per token at the widest moment of a layer."""

    @classmethod
    @abstractmethod
    def ties_embeddings(cls, config: ModelConfig) -> bool:
        """Whether the head uses the token table, and has no weights of its own."""

    @abstractmethod
    def forward(self, batch: BatchTensors, kv: Sequence[LayerKVCache]) -> Tensor:
        """Hidden states of all tokens, [num_tokens, hidden]; writes their keys and values into `kv` (one per layer)."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> logits [num_rows, vocab] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    @classmethod
    def weight_name(cls, config: ModelConfig, checkpoint_name: str) -> str | None:
        """The model's name for a tensor of the checkpoint; None for one that the model does not need."""
        name = checkpoint_name
        for pattern, replacement in cls.renames:
            name = re.sub(pattern, replacement, name)
        if any(re.search(pattern, name) for pattern in cls.ignored):
            return None
        return None if name == "lm_head.weight" and cls.ties_embeddings(config) else name

    def weighted_layers(self) -> list[tuple[str, WeightedLayer]]:
        """Every layer with weights, once, by its name in the model."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, WeightedLayer)]
