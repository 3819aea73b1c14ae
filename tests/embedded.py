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
from quire.runner import memory_plan
from quire.text.tokenizer import tokenizer
from quire.text.tokenizer.files import TokenizerFiles, read_tokenizer_files


@contextmanager
def kept() -> Iterator[None]:
    """Meanwhile plans and tokenizers of the embedded checkpoints are made from what was found before."""
    read = functools.cache(read_tokenizer_files)
    measured: dict[tuple[object, ...], int] = {}

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
        fields = {
            name: getattr(config, name) for name in config.__slots__ if name not in ("hf_config", "max_model_len")
        }
        shard = None if ranks is None else ranks.shard
        key = (json.dumps(dict(config.hf_config)), repr(fields), num_tokens, repr(lora), kernels.isa(), shard)
        if key not in measured:
            measured[key] = activation_bytes(config, num_tokens, lora, ranks)
        return measured[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "read_tokenizer_files", files)
        patch.setattr(memory_plan, "activation_bytes", peak)
        yield
