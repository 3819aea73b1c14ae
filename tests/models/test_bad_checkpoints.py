"""Checkpoints whose folder or configuration is missing, unsafe or inconsistent: each a clear error, and no other."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.args import EngineArgs
from quire.config.checkpoint.architectures import MODELS
from quire.config.checkpoint.safetensors import read_header
from quire.config.model import ModelConfig
from quire.models.registry import model_class
from quire.models.weights.loader import load_model
from tests.effort import examples
from tests.models.small_checkpoint import FIELDS, load, weights, write


def test_the_checkpoint_that_the_others_break_is_good(folder: Path, paged_run: Callable[..., Any]) -> None:
    config = ModelConfig.resolve(folder)
    (logits,) = paged_run(load_model(config), config, [[1, 2, 3]]).step([3])
    assert logits.shape == (3, 16)
    assert torch.isfinite(logits).all()


LONG = "x" * 100_000

# --- the folder


def test_path_like_name_that_does_not_exist(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "./nowhere", "no/such/folder", "quire-tyni", ""):
        with pytest.raises(CheckpointError, match=r"there is no folder|no config"):
            ModelConfig.resolve(name)


def test_misspelt_embedded_name_is_corrected() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'quire-tiny'"):
        ModelConfig.resolve("quire-tyni")


def test_file_instead_of_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a file: give a \.gguf file, or the folder"):
        ModelConfig.resolve(folder / "model.safetensors")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.resolve(tmp_path)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors weights"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}.*can run code.*save_pretrained"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_devices_are_no_files_of_a_checkpoint(folder: Path, name: str) -> None:
    """One gives bytes without end, and says that it has none."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file"):
        load(folder)


def test_a_file_that_cannot_be_read_says_why(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Too many levels"):
        ModelConfig.resolve(folder)
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


# --- config.json


def test_a_config_file_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(16 * 1024**2 + 1)
    with pytest.raises(CheckpointError, match=r"config\.json has 16,777,217 bytes: at most 16,777,216 are allowed"):
        ModelConfig.resolve(folder)


@pytest.mark.parametrize("text", ["", '{"vocab_size": 16', "[1]", "\x00\x01", '"text"'])
def test_malformed_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.resolve(folder)


@pytest.mark.parametrize("key", ["architectures", "vocab_size", "hidden_size", "max_position_embeddings"])
def test_missing_key_is_named(folder: Path, key: str) -> None:
    write(folder, {k: v for k, v in FIELDS.items() if k != key}, weights())
    with pytest.raises(CheckpointError, match=key):
        ModelConfig.resolve(folder)


@pytest.mark.parametrize("value", [0, -1, 1.5, "16", True, [], 10**30])
@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "max_position_embeddings", "num_key_value_heads"])
def test_invalid_sizes(folder: Path, key: str, value: Any) -> None:
    write(folder, FIELDS | {key: value}, weights())
    with pytest.raises(CheckpointError, match=key):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "'dtype' is 'int8'"),
        ({"num_key_value_heads": 3}, "2 attention heads cannot share 3"),
        ({"head_dim": 3}, "even number of dimensions, not 3: head_dim is 3"),
        ({"head_dim": 65538}, "not 65538: head_dim is 65538, .*, and at most 65536 dimensions are supported"),
        ({"head_dim": 10**9}, "not 1000000000: head_dim is 1000000000, .*, and at most 65536 dimensions"),
        ({"partial_rotary_factor": 1.5}, "not 6: head_dim is 4, partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 1e308}, r"head_dim is 4, partial_rotary_factor is 1e\+308"),
        *[
            (
                {"rope_parameters": {"rope_type": kind, "factor": factor}},
                r"32 positions times a factor of 1e\+308 are too",
            )
            for kind, factor in (("yarn", 1e308), ("dynamic", 1e308), ("yarn", 10**308))
        ],
        *[({key: LONG}, f"'{key}' is 'x{{80}}', ") for key in ("hidden_act", "dtype")],
        ({"layer_types": [LONG]}, r"layer_types \['x{80}'\]: supported"),
        ({"rope_parameters": {"rope_type": LONG}}, "rope_type is 'x{80}', supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0, "x": LONG}},
            "make no sense: .*x$",
        ),
        ({"hidden_act": "sine"}, "'hidden_act' is 'sine', supported"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type is 'spiral', supported"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "'factor' is -2"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "'factor' is 1000"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "make no sense"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "rope_parameters has no 'full_attention'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "a list of 2 numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 0], "long_factor": [1.0, 1.0]}},
            "'short_factor' is 0",
        ),
        ({"rope_scaling": [1]}, "'rope_scaling' is .1., but must be an object"),
        ({"hidden_act": 5}, "'hidden_act' is 5, but must be a string"),
        ({"num_hidden_layers": 4097}, "'num_hidden_layers' is 4097, more than 4096"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (
            {"quantization_config": {"quant_method": "quire", "format": "int8", "version": 99}},
            "'int8' in version 99 of the layout, .* run `quire quantize` again",
        ),
        ({"quantization_config": {"quant_method": "quire", "format": "int3", "version": 3}}, "quantized to 'int3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights of None bits"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
    ],
)
def test_config_that_makes_no_sense(folder: Path, fields: dict[str, Any], message: str) -> None:
    write(folder, FIELDS | fields, weights())
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert len(str(caught.value)) < 1_000


def test_a_quantization_is_known_and_said_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='int5', did you mean"):
        ModelConfig.resolve(folder, quantization="int5")
    write(
        folder, FIELDS | {"quantization_config": {"quant_method": "quire", "format": "int8", "version": 3}}, weights()
    )
    for asked in (None, "int8"):
        config = ModelConfig.resolve(folder, quantization=asked)
        assert (config.quantization, config.quant_method) == ("int8", "quire")
    with pytest.raises(ConfigError, match=r"quantization='int4': the weights of .* are int8 already"):
        ModelConfig.resolve(folder, quantization="int4")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (FIELDS | {"architectures": ["JambaForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "JambaForCausalLM"),
        ({"architectures": ["CTRLLMHeadModel"], "n_embd": 8, "n_layer": 1, "n_positions": 16}, "CTRLLMHeadModel"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": FIELDS},
            "LlavaForConditionalGeneration",
        ),
        ({"model_type": "ctrl", "n_embd": 8}, "ctrl"),
    ],
)
def test_an_unsupported_architecture_is_called_so_whatever_else_its_config_has(
    folder: Path, config: dict[str, Any], named: str
) -> None:
    write(folder, config, weights())
    with pytest.raises(UnsupportedModelError, match=f"the architecture '{named}' is not supported") as caught:
        load(folder)
    assert len(str(caught.value)) < 600
    assert "(`quire models` lists those that it has" in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "gpt2"}, {"model_type": "gpt_neox"}])
def test_a_config_that_names_no_architecture_is_told_what_is_missing(folder: Path, config: dict[str, Any]) -> None:
    write(folder, FIELDS | {"architectures": None} | config, weights())
    with pytest.raises(CheckpointError, match="'architectures' is None, but must be a list"):
        load(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=4,
)
CONFIG_KEYS = [*FIELDS, "rope_parameters", "rope_scaling", "rope_theta", "head_dim", "rms_norm_eps", "eos_token_id"]


CONFIG_KEYS += ["sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "torch_dtype", "hidden_act"]


@pytest.mark.parametrize("architecture", sorted(MODELS))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, min_size=1, max_size=3))
def test_no_config_raises_anything_else(architecture: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    fields = FIELDS | {"architectures": [architecture], "use_sliding_window": True, "ffn_dim": 8} | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with contextlib.suppress(CheckpointError):
        config = ModelConfig.resolve(tmp_path)
        model = model_class(config.architecture)
        assert len(model.kv_cache_specs(config)) == config.hf_config["num_hidden_layers"]
        model(dataclasses.replace(config, max_model_len=min(config.max_model_len, 64)))


def test_values_of_both_configs_can_be_replaced(folder: Path) -> None:
    write(folder, FIELDS | {"architectures": ["Unknown"]}, weights())
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    overrides = {"hf_overrides": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 77}}
    config = EngineArgs(model=folder, **overrides, override_generation_config={"top_k": 9, "eos_token_id": 5}).resolve()
    assert config.model.max_model_len == 77
    assert config.model.generation_config["top_k"] == 9
    assert config.model.generation_config["temperature"] == 0.5
    assert config.model.eos_token_ids == {5}
    only = EngineArgs(model=folder, **overrides, generation_config="none", override_generation_config={"top_k": 9})
    assert dict(only.resolve().model.generation_config) == {"top_k": 9}
    with pytest.raises(CheckpointError, match="with overrides: 'vocab_size' is -1"):
        ModelConfig.resolve(folder, hf_overrides=overrides["hf_overrides"] | {"vocab_size": -1})
