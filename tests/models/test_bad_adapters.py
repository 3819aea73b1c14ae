"""PEFT folders that cannot be used are refused in one line that says why; all others are read exactly."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.model import ModelConfig
from quire.models.adapters.peft import inspect_adapter, read_adapter
from quire.models.adapters.peft_config import PeftConfig
from quire.models.base import Model
from quire.models.weights.loader import load_model
from tests.models.adapters import write_adapter

MAX_RANK = 8
Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"
Tensors = dict[str, torch.Tensor]


def factors(name: str = Q, rank: int = 2, n: int = 8, k: int = 8) -> Tensors:
    return {f"{name}.lora_A.weight": torch.ones(rank, k), f"{name}.lora_B.weight": torch.ones(n, rank)}


@pytest.fixture
def config(folder: Path) -> ModelConfig:
    return ModelConfig.resolve(folder)


@pytest.fixture
def model(config: ModelConfig) -> Model:
    return load_model(config)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3', supported is 'LORA'"),
    "DoRA": ({"use_dora": True}, "'use_dora' is True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is"),
    "biases of LoRA": ({"lora_bias": True}, "'lora_bias' is True"),
    "biases of the model": ({"bias": "lora_only"}, "'bias' is 'lora_only', supported is 'none'"),
    "repeated layers": ({"layer_replication": [[0, 1], [0, 1]]}, "'layer_replication' is"),
    "single tokens": ({"trainable_token_indices": [1]}, "'trainable_token_indices' is"),
    "parameters": ({"target_parameters": ["a"]}, "'target_parameters' is"),
    "a setting of the future": ({"use_hydra": {"heads": 3}}, "'use_hydra' is {'heads': 3}: adapters that need it"),
    "changed weights": ({"init_lora_weights": "pissa_niter_16"}, "'init_lora_weights' is 'pissa_niter_16'"),
    "a malformed start": ({"init_lora_weights": ["pissa"]}, "'init_lora_weights' is"),
    "rank 0": ({"r": 0}, "'r' is 0, but must be an integer from 1"),
    "a rank of text": ({"r": "2"}, "'r' is '2'"),
    "a giant rank": ({"r": 2**40}, "'r' is 1099511627776"),
    "alpha NaN": ({"lora_alpha": math.nan}, "'lora_alpha' is nan, but must be a finite number"),
    "alpha infinity": ({"lora_alpha": math.inf}, "'lora_alpha' is inf"),
    "alpha 0": ({"lora_alpha": 0}, "'lora_alpha' is 0"),
    "an alpha beyond float32": ({"lora_alpha": 1e300}, "times its scale 5e[+]299 holds infinities or NaNs"),
    "no flag": ({"use_rslora": 1}, "'use_rslora' is 1, but must be true or false"),
    "targets of numbers": ({"target_modules": [1]}, "'target_modules' must be a list of names"),
    "targets of an object": ({"target_modules": {"a": 1}}, "'target_modules' must be a list of names"),
    "tensors of no target": ({"target_modules": ["k_proj"]}, "'.*q_proj' has tensors, but is not one of the target"),
    "another rank": ({"r": 4}, r"lora_A of .* is \[2, 8\], but adapter_config.json says rank 4"),
    "another rank by pattern": ({"rank_pattern": {"q_proj": 3}}, "says rank 3"),
    "patterns of a list": ({"rank_pattern": ["q_proj"]}, "'rank_pattern' is .* but must be an object"),
    "a pattern of text": ({"alpha_pattern": {"q_proj": "8"}}, "'q_proj' is '8', but must be a finite number"),
    "a malformed pattern": ({"alpha_pattern": {"(q_proj": 8}}, r"the pattern '\(q_proj': "),
    "a pattern with flags": ({"alpha_pattern": {"(?s:a)": 8}}, "flags are not supported"),
    "a pattern that closes what PEFT opens": ({"alpha_pattern": {"a)|(b": 8}}, "unbalanced parenthesis"),
    "thousands of patterns": ({"alpha_pattern": {f"a{i}": 8 for i in range(4097)}}, "more than 4,096 patterns"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be_followed(name: str, model: Model, tmp_path: Path) -> None:
    settings, words = SETTINGS[name]
    folder = write_adapter(tmp_path / "adapter", factors(), **({"r": 2, "lora_alpha": 1} | settings))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(folder, model, MAX_RANK)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


TENSORS: dict[str, tuple[Tensors, str]] = {
    "none": ({}, "has no tensors"),
    "only A": ({f"{Q}.lora_A.weight": torch.ones(2, 8)}, "has lora_A, but not the other factor"),
    "only B": ({f"{Q}.lora_B.weight": torch.ones(8, 2)}, "has lora_B, but not the other factor"),
    "an embedding": ({"model.embed_tokens.lora_embedding_A": torch.ones(2, 16)}, "is no lora_A or lora_B weight"),
    "a magnitude": (factors() | {f"{Q}.lora_magnitude_vector": torch.ones(8)}, "is no lora_A or lora_B weight"),
    "a bias of LoRA": (factors() | {f"{Q}.lora_B.bias": torch.ones(8)}, "is no lora_A or lora_B weight"),
    "another adapter's": ({f"{Q}.lora_A.other.weight": torch.ones(2, 8)}, "adapts .*q_proj.lora_A.other|is no lora_A"),
    "the head": (factors("lm_head", 2, 16, 8), "adapts 'lm_head'.*possible are down_proj, gate_proj"),
    "the token table": (factors("model.embed_tokens", 2, 16, 8), "adapts 'model.embed_tokens'"),
    "a layer beyond the last": (factors("model.layers.1.self_attn.q_proj"), "adapts 'model.layers.1.self_attn.q_proj'"),
    "a fused module": (factors("model.layers.0.self_attn.qkv_proj"), "adapts 'model.layers.0.self_attn.qkv_proj'"),
    "twice": (factors() | {f"{Q}.lora_A.default.weight": torch.ones(2, 8)}, "is there twice"),
    "under two names": (factors() | factors("layers.0.self_attn.q_proj"), "are the same module"),
    "a long name": ({f"{'x' * 400}.lora_A.weight": torch.ones(2, 8)}, "is no lora_A or lora_B weight"),
    "outputs of another model": (factors(n=16), r"lora_B \[16, 2\], but this model needs \[2, 8\] and \[8, 2\]"),
    "inputs of another model": (factors(k=16), r"lora_A \[2, 16\] .*another model's"),
    "a vector": (factors() | {f"{Q}.lora_A.weight": torch.ones(2)}, r"lora_A \[2\]"),
    "a rank of zero": (factors(rank=0), r"lora_A of .* is \[0, 8\], but"),
    "NaNs in A": (factors() | {f"{Q}.lora_A.weight": torch.full((2, 8), math.nan)}, "holds infinities or NaNs"),
    "an infinity in B": (factors() | {f"{Q}.lora_B.weight": torch.full((8, 2), -math.inf)}, "holds infinities or NaNs"),
    "integers": (factors() | {f"{Q}.lora_B.weight": torch.ones(8, 2, dtype=torch.int8)}, "is int8, allowed are"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name: str, model: Model, tmp_path: Path) -> None:
    tensors, words = TENSORS[name]
    with pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(write_adapter(tmp_path / "adapter", tensors, r=2), model, MAX_RANK)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_rank_above_the_largest_says_what_to_set(model: Model, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", factors(rank=9), r=9)
    with pytest.raises(CheckpointError, match=r"rank 9 of .* is more than max_lora_rank=8: start with a larger one"):
        read_adapter(folder, model, MAX_RANK)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json: not the folder"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors: save"),
    "a pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "a format that can run code: save"
    ),
    "settings of a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "must hold an object"),
    "half of the settings": (lambda f: (f / "adapter_config.json").write_text('{"r": '), "not valid JSON"),
    "no method": (lambda f: (f / "adapter_config.json").write_text("{}"), "has no 'peft_type'"),
    "half of the tensors": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-8]),
        "is truncated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_missing_or_malformed(name: str, model: Model, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", factors(), r=2)
    spoil, words = FILES[name]
    spoil(folder)
    with pytest.raises(CheckpointError, match=words):
        read_adapter(folder, model, MAX_RANK)


def test_a_folder_that_no_file_system_can_have_has_no_adapter(model: Model, tmp_path: Path) -> None:
    for name in ("x" * 300, "x/" * 4000, "a\0b"):
        with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
            read_adapter(tmp_path / name, model, MAX_RANK)


def test_what_changes_nothing_is_accepted(model: Model, tmp_path: Path) -> None:
    """Also names with the adapter's name in them, and names without PEFT's prefix."""
    more = {"use_dora": False, "modules_to_save": None, "layer_replication": [], "init_lora_weights": "gaussian"}
    more |= {"loftq_config": {"a": 1}, "layers_to_transform": [0], "target_modules": ["q_proj", V]}
    named = {name.replace(".weight", ".default.weight"): each for name, each in factors().items()}
    folder = write_adapter(tmp_path / "a", named | factors(V, n=4), prefix="", r=2, lora_alpha=6, **more)
    adapter = read_adapter(folder, model, MAX_RANK)
    assert list(adapter.modules) == ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"]
    assert {module.scale for module in adapter.modules.values()} == {3.0}
    assert (adapter.rank, adapter.base_model_name) == (2, None)


def test_the_first_pattern_that_matches_decides(tmp_path: Path) -> None:
    patterns = {"self_attn.q_proj": 3, "q_proj": 4, "0.mlp.up_proj": 5, "^model.layers.1.mlp.up_proj": 6, "proj": 7}
    folder = write_adapter(tmp_path / "a", factors(), r=2, rank_pattern=patterns, alpha_pattern={"q_proj": 12})
    config = PeftConfig.read(folder)
    names = {"model.layers.0.self_attn.q_proj": 3, "x.q_proj": 4, "my_q_proj": 2, "layers.10.mlp.up_proj": 2}
    names |= {"model.layers.0.mlp.up_proj": 5, "model.layers.1.mlp.up_proj": 6, "k_proj": 2, "a.proj": 7}
    assert {name: config.rank_of(name) for name in names} == names
    assert config.scale_of("x.q_proj") == 12 / 4
    assert config.scale_of("x.k_proj") == 8 / 2, "alpha is 8 where the file says nothing, as in PEFT"


def test_the_digest_is_of_the_content(model: Model, config: ModelConfig, tmp_path: Path) -> None:
    def digest(folder: str, tensors: Tensors, **settings: Any) -> str:
        made = write_adapter(tmp_path / folder, tensors, **({"r": 2} | settings))
        found, adapter = inspect_adapter(made, config, MAX_RANK), read_adapter(made, model, MAX_RANK)
        assert (found.digest, found.num_bytes, found.rank) == (adapter.digest, adapter.num_bytes, adapter.rank)
        return found.digest

    first = digest("a", factors(), base_model_name_or_path="x")
    assert len(first) == 32
    assert digest("b", factors(), base_model_name_or_path="y", lora_dropout=0.5) == first
    named = {name.replace(".weight", ".default.weight"): each for name, each in factors().items()}
    assert digest("c", named, lora_alpha=8) == first
    changed = factors()
    changed[f"{Q}.lora_B.weight"][7, 1] += 0.001
    others = [digest("d", changed), digest("e", factors(), lora_alpha=9), digest("f", factors() | factors(V, n=4))]
    others.append(digest("g", {name: each.bfloat16() for name, each in factors().items()}))
    others.append(digest("h", factors(V, n=4)))
    assert len({first, *others}) == 6


def test_the_base_models_name_is_read(config: ModelConfig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", factors(), r=2, base_model_name_or_path="org/name")
    assert inspect_adapter(folder, config, MAX_RANK).base_model_name == "org/name"


def test_unsupported_adapters_are_told_from_malformed_ones(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        read_adapter(write_adapter(tmp_path / "a", factors(), r=2, use_dora=True), model, MAX_RANK)


def test_many_slow_patterns_are_matched_in_time(tmp_path: Path) -> None:
    """As many modules as a large model has, each compared with the slowest patterns that are allowed."""
    patterns = {f".*a.*b{i}": 1 for i in range(64)} | {f"b{i}": 1 for i in range(4000)}
    folder = write_adapter(tmp_path / "a", factors(), r=2, rank_pattern=patterns)
    config = PeftConfig.read(folder)
    start_s = time.process_time()
    for layer in range(20):
        config.rank_of(f"model.layers.{layer}.self_attn.q_proj" + "a" * 40)
    assert time.process_time() - start_s < 2


def test_settings_are_not_read_without_a_limit(model: Model, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", factors(), r=2)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "auto_mapping": "x" * 17 * 2**20}))
    with pytest.raises(CheckpointError, match="at most 16,777,216 are allowed"):
        read_adapter(folder, model, MAX_RANK)
