"""A tool's quantized weights are a row in each of two tables: here transposed int8 numbers, and a scale per output."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import safetensors.torch
import torch

from quire import kernels
from quire.config import quantization as quantization_config
from quire.config.model import ModelConfig
from quire.models.layers.linear import Linear
from quire.models.layers.weight_format import Matrix
from quire.models.layers.weighted_layer import Part, WeightSpec
from quire.models.weights import quantization
from quire.models.weights.loader import load_model, weight_bytes

from .test_against_transformers import LLAMA

PROMPT = [5, 60, 3, 3, 17, 40, 8]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """`qweight` [k, n] int8 and `scales` [1, n] float32, as tools save them that multiply by columns."""

    def specs(self, parts: tuple[Part, ...], dtype: torch.dtype) -> Mapping[str, WeightSpec]:
        transposed = tuple(Part(part.shape[::-1], part.columns, part.rows) for part in parts)
        scales = tuple(Part((1, part.shape[0]), None, part.rows) for part in parts)
        kept = WeightSpec(parts, dtype).stack_bytes
        return {
            "qweight": WeightSpec(transposed, torch.int8, axis=1, kept_bytes=kept),
            "scales": WeightSpec(scales, torch.float32, axis=1, kept_bytes=0),
        }

    def matrix(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        weight = (tensors["qweight"] * tensors["scales"]).T
        assert weight.shape == shape
        return kernels.pack_weight(weight.to(dtype).contiguous())


def use_scaled(model: Any, config: ModelConfig, checkpoint: Any) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.format = Scaled()


def test_a_matrix_is_made_of_two_tensors(save_checkpoint: Any, paged_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded() -> tuple[torch.Tensor, int]:
        config = ModelConfig.resolve(folder)
        return paged_run(load_model(config), config, [PROMPT]).step([len(PROMPT)])[0], weight_bytes(config)

    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    plain, scaled = safetensors.torch.load_file(folder / "model.safetensors"), {}
    for name in [name for name in plain if "_proj" in name]:
        numbers = (plain[name] * 64).round().clamp(-127, 127)
        scaled[name.replace("weight", "qweight")] = numbers.T.contiguous().to(torch.int8)
        scaled[name.replace("weight", "scales")] = torch.full((1, len(numbers)), 1 / 64)
        plain[name] = numbers / 64
    safetensors.torch.save_file(plain, folder / "model.safetensors")
    expected, num_bytes = loaded()
    others = {name: tensor for name, tensor in plain.items() if "_proj" not in name}
    safetensors.torch.save_file(others | scaled, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "scaled"}}))
    monkeypatch.setitem(quantization_config.METHODS, "scaled", lambda section: "scaled int8")
    monkeypatch.setitem(quantization.PASSES, "scaled", use_scaled)
    found, num_bytes_found = loaded()
    assert torch.equal(found, expected)
    assert num_bytes_found == num_bytes
