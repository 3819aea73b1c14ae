"""The memory that a model computes in is what its kernels really take, for every family."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire import kernels
from quire.config.model import ModelConfig
from quire.models.registry import model_class
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
def test_the_planned_memory_is_at_least_what_kernels_take(variant: str, save_checkpoint: Any, paged_run: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    config = ModelConfig.resolve(folder)
    planned = model_class(architecture).activation_width(config) * NUM_TOKENS * 4
    assert 0.7 * planned <= real_peak(config, paged_run) <= planned
