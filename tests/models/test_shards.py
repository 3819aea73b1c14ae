"""A layer states which rows and columns of a checkpoint's tensors it wants."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.config.model import ModelConfig
from quire.kernels import unpack_weight
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.linear import Linear
from quire.models.weights import loader
from quire.models.weights.loader import load_model

from .test_against_transformers import LLAMA


@pytest.mark.parametrize("half", [0, 1])
def test_a_pass_that_narrows_parts_loads_a_shard(
    half: int, save_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_to_end(size: int) -> tuple[int, int]:
        return half * size // 2, (half + 1) * size // 2

    def split(model: Any, config: ModelConfig, checkpoint: Any) -> None:
        for module in model.modules():
            if isinstance(module, Linear) and len(module.parts) > 1:
                module.parts = tuple(replace(part, rows=first_to_end(part.shape[0])) for part in module.parts)
            elif isinstance(module, Linear):
                module.parts = (replace(module.parts[0], columns=first_to_end(module.parts[0].shape[1])),)

    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA, attention_bias=True)
    monkeypatch.setattr(loader, "choose_formats", split)
    attention: Any = load_model(ModelConfig.resolve(folder)).layers[1].self_attn
    theirs = oracle.model.layers[1].self_attn
    projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    rows = [slice(*first_to_end(len(p.weight))) for p in projections]
    stacked = torch.cat([p.weight[r] for p, r in zip(projections, rows, strict=True)])
    biases = torch.cat([p.bias[r] for p, r in zip(projections, rows, strict=True)])
    assert torch.equal(unpack_weight(attention.qkv_proj.weight), stacked)
    assert torch.equal(attention.qkv_proj.bias, biases)
    columns = slice(*first_to_end(theirs.o_proj.weight.shape[1]))
    assert torch.equal(unpack_weight(attention.o_proj.weight), theirs.o_proj.weight[:, columns])


def test_several_ranges_of_one_tensor_are_stacked(save_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap_halves_of_queries(model: Any, config: ModelConfig, checkpoint: Any) -> None:
        for layer in model.layers:
            query, key, value = layer.self_attn.qkv_proj.parts
            halves = (replace(query, rows=(16, 32)), replace(query, rows=(0, 16)))
            layer.self_attn.qkv_proj.parts = (*halves, key, value)

    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA)
    monkeypatch.setattr(loader, "choose_formats", swap_halves_of_queries)
    fused = {"qkv_proj": ("q_proj", "q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    monkeypatch.setattr(LlamaForCausalLM, "fused", fused)
    model: Any = load_model(ModelConfig.resolve(folder))
    query = oracle.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(unpack_weight(model.layers[0].self_attn.qkv_proj.weight)[:32], query.roll(16, 0))
