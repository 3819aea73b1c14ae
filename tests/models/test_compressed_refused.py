"""Checkpoints of compressed-tensors, FP8 and MXFP4 that are refused, and the errors that say why."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.quantization.compressed import CompressedQuantization
from quire.models.weights.loader import load_model

from .small_checkpoint import SMALL
from .test_compressed_tensors import (
    ACTIVATIONS,
    FLOAT,
    FP8,
    METHODS,
    compressed,
    group,
    mxfp4,
    quantized,
    section,
    write,
)

W4 = group("pack-quantized", num_bits=4, strategy="group", group_size=32)
F8 = group("float-quantized", num_bits=8, type="float", strategy="tensor")
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": (section(W4 | {"format": "nvfp4-pack-quantized"}), "format is 'nvfp4-pack-quantized'; Quire reads pack-"),
    "marlin": (section(W4 | {"format": "marlin-24"}), "format is 'marlin-24'"),
    "sparse": (section(W4, sparsity_config={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'; Quire reads dense"),
    "cache": (section(W4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not supported"),
    "transform": (section(W4, transform_config={"config_groups": {}}), "transform_config is not supported"),
    "status": (section(W4, quantization_status="calibration"), "quantization_status is 'calibration'"),
    "no groups": (section(), "1 to 256 groups"),
    "a preset": (section(W4, config_groups={"W4A16": ["Linear"]}), "must be an object"),
    "an empty group": (section(W4, config_groups={"g": None}), "'g' must be an object"),
    "no weights": (section(W4 | {"weights": None}), "without weights"),
    "bits": (section(W4 | {"weights": W4["weights"] | {"num_bits": 3}}), "weights of 3 bits"),
    "strategy": (section(W4 | {"weights": {"num_bits": 4, "strategy": "x" * 99}}), "scale for each xxx"),
    "group size": (section(W4 | {"weights": {"num_bits": 4, "group_size": 48}}), "group_size is 48; in pack-quantized"),
    "mxfp4 size": (
        section(group("mxfp4-pack-quantized", num_bits=4, type="float", group_size=64)),
        "group_size is 64; in mxfp4",
    ),
    "float group": (section(F8 | {"weights": F8["weights"] | {"strategy": "group", "group_size": 2**21}}), "2097152"),
    "block": (section(F8 | {"weights": F8["weights"] | {"strategy": "block"}}), "'block_structure' is None"),
    "dynamic": (section(W4 | {"weights": W4["weights"] | {"dynamic": True}}), "dynamic weights"),
    "zeros": (section(F8 | {"weights": F8["weights"] | {"symmetric": False}}), "floats with zero points"),
    "static": (section(W4 | {"input_activations": STATIC}), "static scales of inputs"),
    "outputs": (section(F8 | {"output_activations": ACTIVATIONS}), "output_activations is not supported"),
    "order": (section(W4 | {"weights": W4["weights"] | {"actorder": "x"}}), "actorder is 'x'"),
    "targets": (section(W4 | {"targets": "Linear"}), "'targets' must be a list"),
    "a pattern with flags": (section(W4, ignore=["re:(?i)x"]), "flags are not supported"),
    "a malformed pattern": (section(W4, ignore=["re:("]), "'ignore' has the pattern"),
    "patterns": (section(W4, ignore=["re:a"] * 4097), "more than 4,096 patterns"),
    "fp8 numbers": (FP8 | {"fmt": "e5m2"}, "not 'e5m2'"),
    "fp8 cache": (FP8 | {"kv_cache_scheme": "static"}, "without kv_cache_scheme"),
    "fp8 block": (FP8 | {"weight_block_size": [128, 0]}, r"is \[128, 0\], but must be two positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_before_the_weights(name: str, tmp_path: Path) -> None:
    stated, told = REFUSED[name]
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": stated, "dtype": "float16"} | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises((UnsupportedModelError, CheckpointError), match=told):
        ModelConfig.resolve(tmp_path)


def nan(old: Tensor) -> Tensor:
    return torch.where(torch.arange(old.shape[1]) == 3, torch.tensor(torch.nan), old.float()).to(old.dtype)


DAMAGED: dict[str, tuple[dict[str, Any], str, Any, str]] = {
    "scales": (W4, "weight_scale", lambda old: old[:, :1], r"wrong shape.*weight_scale \[128, 1\] instead of"),
    "shape": (W4, "weight_shape", lambda old: old + 1, r"weight_shape is \[129, 129\], but the config says"),
    "words": (W4, "weight_packed", lambda old: old.float(), "wrong dtype.*weight_packed float32"),
    "absent": (W4, "weight_packed", lambda old: None, "missing.*weight_packed"),
    "no order": (
        W4 | {"weights": W4["weights"] | {"actorder": "group"}}, "weight_scale", lambda old: old,
        "missing: .*weight_g_idx",
    ),
    "order": (W4, "weight_g_idx", lambda _: torch.full((128,), 10**9).int(), "g_idx must name each group"),
    "division": (
        group("pack-quantized", num_bits=4, strategy="group", group_size=96), "weight_scale", lambda old: old,
        "group_size 96 does not divide the 128 inputs",
    ),
    "a NaN": (F8, "weight", nan, "weights or scales are not finite"),
    "an infinite scale": (F8, "weight_scale", lambda old: old / 0, "weights or scales are not finite"),
    "zero points": (
        group("pack-quantized", num_bits=4, strategy="tensor", symmetric=False), "weight_zero_point",
        lambda old: old * 0 + 9, "do not fit 4 bits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit_are_named(name: str, llama: Path, tmp_path: Path) -> None:
    module, tensor, change, told = DAMAGED[name]

    def make(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        divided = W4 if module["weights"].get("group_size") else module  # whatever the config says of the groups
        stored, plain = compressed(divided, shape, FLOAT)
        if "layers.0.self_attn.q_proj" in name:
            stored[tensor] = change(stored.get(tensor))
        return {own: value for own, value in stored.items() if value is not None}, plain

    config, _ = quantized(tmp_path, llama, section(module), make)
    with pytest.raises(CheckpointError, match=told):
        load_model(config)


def test_exponents_that_stand_for_nan_are_refused(llama: Path, tmp_path: Path) -> None:
    def make(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        stored, plain = mxfp4(name, shape)
        stored["weight_scales"][0, 0] = 255
        return stored, plain

    config, _ = quantized(tmp_path, llama, METHODS["gpt-oss's MXFP4"][0], make)
    with pytest.raises(CheckpointError, match="exponents 255"):
        load_model(config)


def test_groups_of_32_must_fill_the_inputs(save_checkpoint: Any, tmp_path: Path) -> None:
    like = save_checkpoint("LlamaForCausalLM", **SMALL | {"intermediate_size": 80})[0]
    stated, make, _ = METHODS["gpt-oss's MXFP4"]
    config, _ = quantized(tmp_path, like, stated, lambda name, shape: None if shape[1] == 80 else make(name, shape))
    tensors = load_file(config.path / "model.safetensors")
    blocks = {"weight_blocks": torch.zeros(128, 2, 16), "weight_scales": torch.zeros(128, 2)}
    name = "model.layers.0.mlp.down_proj."
    tensors |= {name + own: tensor.to(torch.uint8) for own, tensor in blocks.items()}
    del tensors[f"{name}weight"]
    write(config.path, tensors, like, stated)
    with pytest.raises(CheckpointError, match="80 inputs are not whole groups of 32"):
        load_model(config)


def test_token_tables_are_plain(llama: Path, tmp_path: Path) -> None:
    config, _ = quantized(tmp_path, llama, section(W4), lambda _, shape: compressed(W4, shape, FLOAT))
    tensors = load_file(config.path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    stored, _ = compressed(W4, (64, 128), FLOAT)
    tensors |= {f"model.embed_tokens.{own}": tensor for own, tensor in stored.items()}
    write(config.path, tensors, llama, section(W4))
    with pytest.raises(
        CheckpointError, match=r"missing: embed_tokens.weight; .*unexpected: model.embed_tokens.weight_"
    ):
        load_model(config)


def test_a_name_goes_before_a_pattern_and_that_before_a_class() -> None:
    """In every order of the groups. The bits tell which of them was chosen."""
    by_class, by_pattern = W4, F8 | {"targets": ["re:.*q_proj"]}
    by_name = group("pack-quantized", targets=["m.q_proj"], num_bits=8, strategy="channel")
    for groups in itertools.permutations([by_class, by_pattern, by_name]):
        read = CompressedQuantization.read(HFConfig(section(*groups, ignore=["lm_head"]), "config.json"))
        found = [read.scheme_of(name) for name in ("m.q_proj", "n.q_proj", "m.k_proj", "lm_head")]
        assert [None if scheme is None else (scheme.format, scheme.bits) for scheme in found] == [
            ("pack-quantized", 8), ("float-quantized", 8), ("pack-quantized", 4), None,
        ]  # fmt: skip
