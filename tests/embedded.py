"""What engines of the embedded checkpoints read and measure when they are made, kept for all tests of a process.

Thousands of tests make an engine. Reading its tokenizer and measuring its activations took longer than what they test.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire import kernels
from quire.config.checkpoint.location import EMBEDDED_ROOT
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.models.activations import activation_bytes
from quire.models.weights.usage import WeightUse, weight_use
from quire.runner import memory_plan
from quire.text.tokenizer import tokenizer
from quire.text.tokenizer.files import TokenizerFiles, read_tokenizer_files


@contextmanager
def kept() -> Iterator[None]:
    """Meanwhile plans and tokenizers of the embedded checkpoints are made from what was found before."""
    read = functools.cache(read_tokenizer_files)
    peaks: dict[tuple[object, ...], int] = {}
    uses: dict[tuple[object, ...], WeightUse] = {}

    def files(folder: Path) -> TokenizerFiles:
        if folder.parent != EMBEDDED_ROOT:
            return read_tokenizer_files(folder)
        found = read(folder)
        return TokenizerFiles(found.backend, dict(found.special_tokens), dict(found.chat_templates))

    def peak(
        config: ModelConfig, num_tokens: int, lora: LoRAConfig | None = None, ranks: kernels.Ranks | None = None
    ) -> int:
        if config.path.parent != EMBEDDED_ROOT:
            return activation_bytes(config, num_tokens, lora, ranks)
        key = (*_key(config, ranks), num_tokens, repr(lora))
        if key not in peaks:
            peaks[key] = activation_bytes(config, num_tokens, lora, ranks)
        return peaks[key]

    def use(config: ModelConfig, ranks: kernels.Ranks | None = None) -> WeightUse:
        if config.path.parent != EMBEDDED_ROOT:
            return weight_use(config, ranks)
        key = _key(config, ranks)
        if key not in uses:
            uses[key] = weight_use(config, ranks)
        return uses[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "read_tokenizer_files", files)
        patch.setattr(memory_plan, "activation_bytes", peak)
        patch.setattr(memory_plan, "weight_use", use)
        yield


def _key(config: ModelConfig, ranks: kernels.Ranks | None) -> tuple[object, ...]:
    """All that a model's memory depends on: not how tokens are drawn, nor how long sequences may be."""
    left_out = ("hf_config", "generation_config", "max_model_len")
    fields = {name: getattr(config, name) for name in config.__slots__ if name not in left_out}
    assert " object at 0x" not in repr(fields), "an address would never be found again"
    return json.dumps(dict(config.hf_config)), repr(fields), kernels.isa(), None if ranks is None else ranks.shard
