"""GGUF files of every architecture: the same logits as from the checkpoint that was converted, and the same blocks."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quire import kernels
from quire.config.checkpoint.gguf.table import ARCHITECTURES
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model, weight_bytes
from quire.models.weights.saving import save_quantized

from .families import FULL, SLIDING
from .gguf_convert import Kind, convert
from .test_gguf import logits_of, rows_of
from .variants import VARIANTS

ROPE = {"rope_type": "default", "rope_theta": 500.0}
ALIBI = {"alibi": True, "alibi_bias_max": 6, "clip_qkv": None}
CHANGES: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee-biases": {}, "bloom": {}, "cohere": {}, "dbrx": {"rope_parameters": ROPE},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "ernie4-5-biases": {}, "ernie4-5-moe": {}, "ernie4-5-moe-some-layers": {}, "exaone4": {}, "exaone4-full": {},
    "falcon-7b": {}, "falcon-40b": {}, "falcon-one-norm": {}, "gemma": {}, "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3-stretched": {
        "num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL], "query_pre_attn_scalar": 16
    },
    "glm": {}, "glm4": {}, "glm4-moe-groups": {}, "gpt2": {}, "gptj": {}, "gpt-neox": {}, "gpt-neox-serial": {},
    "gpt-oss": {"num_hidden_layers": 2, "moe_intermediate_size": 48},
    "gpt-oss-yarn-full": {"layer_types": [SLIDING, FULL], "swiglu_limit": 7.0, "moe_intermediate_size": 48},
    "granite": {}, "granite-moe": {}, "hunyuan": {}, "hunyuan-alpha": {}, "llama-biases": {},
    "mpt": {"attn_config": ALIBI},
    "mpt-clipped": {"attn_config": ALIBI | {"clip_qkv": 1.0}}, "nemotron": {}, "olmo-clipped": {}, "olmo2": {},
    "olmo3": {}, "phi": {}, "phi3": {}, "phi3-partial-longrope": {},
    "phimoe": {"sliding_window": None, "lm_head_bias": True, "attention_bias": True}, "qwen2": {}, "qwen2-moe": {},
    "qwen3": {}, "qwen3-moe": {}, "seed-oss-biases": {}, "smollm3": {}, "stablelm": {}, "stablelm-parallel": {},
    "starcoder2": {"sliding_window": None}, "olmoe": {}, "mixtral": {},
}  # fmt: skip
"""A variant -> fields of its config that differ: the format has no key for some, and its files the default."""


def blocks_where_they_fit(name: str) -> Kind:
    """Q8_0 for all matrices but those with rows that are not whole blocks, and those that converters never quantize."""
    if name.endswith(".bias") or "ffn_gate_inp" in name or name == "position_embd.weight":
        return Kind.F32
    return Kind.F16 if "ffn_down" in name else Kind.Q8_0


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_is_the_checkpoint_it_was_made_of(
    name: str, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    architecture, fields = VARIANTS[name]
    folder, _ = save_checkpoint(architecture, **fields | CHANGES[name])
    config, expected = ModelConfig.resolve(convert(folder, tmp_path / "m.gguf")), ModelConfig.resolve(folder)
    assert (config.architecture, config.dtype, config.quant_method) == (architecture, "float32", None)
    assert weight_bytes(config) == weight_bytes(expected)
    logits = logits_of(config, paged_run)
    # A norm's weight and 1 have a sum that is rounded; all else is the same number.
    tolerance = 1e-5 if name.startswith(("gemma", "nemotron")) or "longrope" in name else 0.0
    torch.testing.assert_close(logits, logits_of(expected, paged_run), rtol=tolerance, atol=tolerance)
    blocks, plain = (
        ModelConfig.resolve(
            convert(folder, tmp_path / f"{dequantized}.gguf", blocks_where_they_fit, dequantized=dequantized),
            dtype="float32",
        )
        for dequantized in (False, True)
    )
    assert (blocks.quant_method, plain.quant_method) == ("gguf", None)
    pairs = zip(load_model(blocks).weighted_layers(), load_model(plain).weighted_layers(), strict=True)
    num_blocks = 0
    for (module, layer), (_, other) in pairs:
        matrix, same = (getattr(each, "weight", getattr(each, "table", None)) for each in (layer, other))
        num_blocks += type(matrix) is not type(same)
        if matrix is not None and (not isinstance(matrix, torch.Tensor) or matrix.ndim == 2):
            assert torch.equal(rows_of(matrix), rows_of(same)), module
    assert num_blocks


@pytest.mark.parametrize("name", ["glm", "llama-biases", "phi"])
def test_queries_keys_and_values_may_be_in_one_tensor(
    name: str, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    architecture, fields = VARIANTS[name]
    folder, _ = save_checkpoint(architecture, **fields)
    apart, fused = (
        ModelConfig.resolve(convert(folder, tmp_path / f"{fuse}.gguf", fuse_qkv=fuse)) for fuse in (False, True)
    )
    assert torch.equal(logits_of(fused, paged_run), logits_of(apart, paged_run))
    blocks = ModelConfig.resolve(convert(folder, tmp_path / "b.gguf", blocks_where_they_fit, fuse_qkv=True))
    model, plain = load_model(blocks), load_model(apart)
    rows, exact = (rows_of(each.layers[0].self_attn.qkv_proj.weight).float() for each in (model, plain))
    assert 0 < (rows - exact).abs().max() < 0.02


@pytest.mark.skipif(kernels.isa() == "reference", reason="saved weights are in the native kernels' layout")
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "gemma", "granite-moe"])
def test_a_file_is_quantized_to_a_folder(name: str, save_checkpoint: Any, paged_run: Any, tmp_path: Path) -> None:
    architecture, fields = VARIANTS[name]
    folder, _ = save_checkpoint(architecture, **fields | CHANGES[name])
    config = ModelConfig.resolve(
        convert(folder, tmp_path / "m.gguf", blocks_where_they_fit), dtype="float32", quantization="int8"
    )
    save_quantized(config, tmp_path / "saved", lambda _: None)
    saved = ModelConfig.resolve(tmp_path / "saved")
    assert torch.equal(logits_of(saved, paged_run), logits_of(config, paged_run))


def test_layers_that_predict_further_tokens_are_left_out(save_checkpoint: Any, tmp_path: Path) -> None:
    architecture, fields = VARIANTS["glm4-moe"]
    folder, _ = save_checkpoint(architecture, **fields)
    path = convert(folder, tmp_path / "m.gguf", extra={"blk.3.nextn.eh_proj.weight": np.zeros((32, 64), np.float32)})
    config = ModelConfig.resolve(path)
    assert config.hf_config["num_hidden_layers"] == 3
    load_model(config)


def test_every_architecture_of_the_format_is_tested() -> None:
    tested = {VARIANTS[name][0] for name in CHANGES}
    classes = {each for row in ARCHITECTURES.values() for each in (row.name, row.mixture) if each is not None}
    assert classes <= tested
    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())
