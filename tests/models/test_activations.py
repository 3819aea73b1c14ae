"""The memory that a model computes in is what its kernels really take, for every family."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire import kernels
from quire.config.model import ModelConfig
from quire.models.activations import activation_bytes
from quire.models.weights.loader import load_model
from tests.kernels.isas import needs_native

from .test_against_transformers import VARIANTS

NUM_TOKENS = 96


class Watched(kernels.Workspace):
    """Remembers the most that was taken at once."""

    peak_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        out = super().empty(shape, dtype)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes_taken)
        return out


def real_peak(config: ModelConfig, paged_run: Any) -> int:
    model, workspace = load_model(config), Watched()
    forward = model.forward

    def watched(*args: Any) -> torch.Tensor:
        with workspace.recording():
            return forward(*args)

    model.forward = watched  # type: ignore[method-assign]
    paged_run(model, config, [range(60), range(NUM_TOKENS - 60)]).step([60, NUM_TOKENS - 60])
    return workspace.peak_bytes


@needs_native
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_measured_memory_is_what_kernels_take(variant: str, save_checkpoint: Any, paged_run: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    config = ModelConfig.resolve(folder)
    assert real_peak(config, paged_run) == activation_bytes(config, NUM_TOKENS)


@needs_native
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_products_take_a_little_less_than_measured(quantization: str, paged_run: Any) -> None:
    config = ModelConfig.resolve("quire-draft", quantization=quantization)
    config = dataclasses.replace(config, max_model_len=NUM_TOKENS)
    measured = activation_bytes(config, NUM_TOKENS)
    assert 0.8 * measured <= real_peak(config, paged_run) <= measured


def test_measuring_reads_no_weights(tmp_path: Any, save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint(*VARIANTS["opt"][:1], **VARIANTS["opt"][1])
    data = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    with (folder / "model.safetensors").open("r+b") as file:  # the same length, and nothing in it
        file.truncate(header)
        file.truncate(len(data))
    config = ModelConfig.resolve(folder)
    few, many = (activation_bytes(config, num_tokens) for num_tokens in (1, 1000))
    assert 900 * few < many <= 1000 * few
