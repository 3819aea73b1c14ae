"""Checkpoints that are missing, half-written, unsafe or inconsistent: each a clear error, and no other exception."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.architectures import MODELS
from quire.config.args import EngineArgs
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.safetensors import read_header
from quire.config.model import ModelConfig
from quire.models.registry import model_class
from quire.models.weights.loader import load_model, reading, weight_bytes
from tests.effort import examples

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write(folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", FIELDS, weights())


def load(folder: Path) -> None:
    load_model(ModelConfig.resolve(folder))


def test_the_checkpoint_that_the_others_break_is_good(folder: Path, paged_run: Callable[..., Any]) -> None:
    config = ModelConfig.resolve(folder)
    (logits,) = paged_run(load_model(config), config, [[1, 2, 3]]).step([3])
    assert logits.shape == (3, 16)
    assert torch.isfinite(logits).all()


# --- the folder


def test_path_like_name_that_does_not_exist(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "./nowhere", "no/such/folder", "quire-tyni", ""):
        with pytest.raises(CheckpointError, match=r"there is no folder|no config"):
            ModelConfig.resolve(name)


def test_misspelt_embedded_name_is_corrected() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'quire-tiny'"):
        ModelConfig.resolve("quire-tyni")


def test_file_instead_of_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file: give the folder"):
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
        ({"head_dim": 3}, "even head_dim"),
        ({"hidden_act": "sine"}, "'hidden_act' is 'sine', supported"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type is 'spiral', supported"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "'factor' is -2"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "'factor' is 1000"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "make no sense"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, "per type of layer"),
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
        ({"quantization_config": {"quant_method": "quire", "format": "int3", "version": 1}}, "quantized to 'int3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
    ],
)
def test_config_that_makes_no_sense(folder: Path, fields: dict[str, Any], message: str) -> None:
    write(folder, FIELDS | fields, weights())
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_quantization_is_known_and_said_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='int5', did you mean"):
        ModelConfig.resolve(folder, quantization="int5")
    write(
        folder, FIELDS | {"quantization_config": {"quant_method": "quire", "format": "int8", "version": 1}}, weights()
    )
    for asked in (None, "int8"):
        config = ModelConfig.resolve(folder, quantization=asked)
        assert (config.quantization, config.quant_method) == ("int8", "quire")
    with pytest.raises(ConfigError, match=r"quantization='int4': the weights of .* are int8 already"):
        ModelConfig.resolve(folder, quantization="int4")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (FIELDS | {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "Phi3ForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 1, "n_positions": 16}, "GPT2LMHeadModel"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": FIELDS},
            "Gemma3ForConditionalGeneration",
        ),
        ({"model_type": "gpt2", "n_embd": 8}, "gpt2"),
    ],
)
def test_an_unsupported_architecture_is_called_so_whatever_else_its_config_has(
    folder: Path, config: dict[str, Any], named: str
) -> None:
    write(folder, config, weights())
    with pytest.raises(UnsupportedModelError, match=f"the architecture '{named}' is not supported") as caught:
        load(folder)
    assert all(name in str(caught.value) for name in MODELS)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("config", [{"architectures": None}, {"architectures": None, "model_type": "llama"}])
def test_a_config_that_names_no_architecture_is_told_what_is_missing(folder: Path, config: dict[str, Any]) -> None:
    write(folder, FIELDS | config, weights())
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
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, min_size=1, max_size=3))
def test_no_config_raises_anything_else(architecture: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    fields = FIELDS | {"architectures": [architecture], "use_sliding_window": True, "ffn_dim": 8} | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with contextlib.suppress(CheckpointError):
        config = ModelConfig.resolve(tmp_path)
        model = model_class(config.architecture)
        assert len(model.kv_cache_specs(config)) == config.hf_config["num_hidden_layers"]
        model(dataclasses.replace(config, max_model_len=min(config.max_model_len, 64)))


# --- weights that are not those of the config


def test_every_wrong_weight_is_named(folder: Path) -> None:
    tensors = weights()
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(12, 9)
    tensors["model.extra.weight"] = torch.zeros(2)
    write(folder, FIELDS, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "2 weight(s) missing: layers.0.self_attn.k_proj.weight, norm.weight" in message
    assert "1 weight(s) unexpected: model.extra.weight" in message
    assert "layers.0.mlp.up_proj.weight [12, 9] instead of [12, 8]" in message


def test_of_many_wrong_weights_some_are_named(folder: Path) -> None:
    write(folder, FIELDS, weights() | {f"model.extra{i:04}": torch.zeros(1) for i in range(1000)})
    with pytest.raises(
        CheckpointError, match=r"1000 weight\(s\) unexpected: model\.extra0000, .* and others"
    ) as caught:
        load(folder)
    assert len(str(caught.value)) < 1000


def test_weight_of_unreadable_dtype(folder: Path) -> None:
    write(folder, FIELDS, weights() | {"model.norm.weight": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=r"1 weight\(s\) of a wrong dtype: model\.norm\.weight int64"):
        load(folder)


def test_saved_rotary_tables_are_ignored(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    before = weight_bytes(ModelConfig.resolve(folder))
    write(folder, FIELDS, weights() | extra)
    load(folder)
    assert weight_bytes(ModelConfig.resolve(folder)) == before


def test_second_copy_of_a_tied_head_must_be_the_same(folder: Path) -> None:
    tensors = weights()
    write(folder, FIELDS, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    load(folder)
    write(folder, FIELDS, tensors | {"lm_head.weight": torch.zeros(16, 8)})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(folder)


def test_same_weight_under_two_names(folder: Path) -> None:
    write(folder, FIELDS, weights() | {"norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match="same weight"):
        load(folder)


# --- shards


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", 3, None])
def test_index_that_leads_out_of_the_folder(folder: Path, file: Any) -> None:
    write_index(folder, {"model.norm.weight": file})
    with pytest.raises(CheckpointError, match="must be a safetensors file of the same folder"):
        load(folder)


@pytest.mark.parametrize("name", ["model-00002-of-00002", "x" * 300, "\0", "\ud800"])
def test_missing_shard_is_named(folder: Path, name: str) -> None:
    write_index(folder, {"model.norm.weight": f"{name}.safetensors"})
    with pytest.raises(CheckpointError, match=f"lacks the weight file {name}"):
        load(folder)


def test_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    write_index(folder, dict.fromkeys([*SHAPES, "model.gone.weight"], "model-00001-of-00001.safetensors"))
    with pytest.raises(CheckpointError, match=r"lacks tensors.*model\.gone\.weight"):
        load(folder)


def test_only_the_tensors_that_the_index_names_are_taken(folder: Path) -> None:
    names = [name for name in SHAPES if name != "model.norm.weight"]
    write_index(folder, dict.fromkeys(names, "model-00001-of-00001.safetensors"))
    assert list(open_checkpoint(folder).tensors) == names


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        load(folder)


def test_shards_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="incomplete"):
        load(folder)


# --- safetensors headers


def raw_file(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        ([1], b"", "JSON list"),
        ({"a": 1}, b"", "not an object"),
        ({"a": entry(dtype="F33")}, bytes(8), "tensor 'a' has dtype 'F33'"),
        ({"a": entry(shape=[-1])}, bytes(8), r"has shape \[-1\] and data_offsets \[0, 8\]: malformed"),
        ({"a": entry(shape=[0, 2**62])}, bytes(8), "malformed"),
        ({"a": entry(shape=[0, 2**62 - 1])}, bytes(8), "needs 0 bytes"),
        ({"a": entry(shape=[1] * 65)}, bytes(8), "malformed"),
        ({"a": entry(shape=[2.0])}, bytes(8), "malformed"),
        ({"a": entry(start=8, end=0)}, bytes(8), "malformed"),
        ({"a": entry(start=None)}, bytes(8), "malformed"),
        ({"a": entry(shape=[3])}, bytes(8), "needs 12 bytes"),
        ({"a": entry(shape=[2**40, 2**40])}, bytes(8), "needs"),
        ({"a": entry()}, bytes(7), "truncated: its header promises"),
        ({"a": entry()}, bytes(9), "1 bytes after its last tensor"),
        ({"a": entry(), "b": entry(start=4, end=12)}, bytes(12), "tensor 'b' overlaps 'a':"),
        ({"a": entry(), "b": entry(start=12, end=20)}, bytes(20), "tensor 'b' leaves a hole after 'a':"),
        ({"a": entry(start=1, end=9)}, bytes(9), "tensor 'a' leaves a hole after 'the header':"),
        ({"a": entry(shape=[2**61] * 100_000)}, bytes(8), "malformed"),
        ({"a" * 100_000: entry(dtype="F" * 100_000)}, bytes(8), "has dtype"),
        ({"a": entry(shape="9" * 100_000)}, bytes(8), "malformed"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
        (b'{"a\xff": 1}', b"", "not valid JSON"),
        (b'{"a": {"dtype": "F32"}, "a": {}}', b"", "appears twice"),
    ],
)
def test_lying_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_tensors_may_be_listed_in_another_order_than_they_lie_in_the_file(tmp_path: Path) -> None:
    entries = {"b": entry(start=8, end=16), "empty": entry(shape=[0], start=8, end=8), "a": entry(shape=[1] * 63 + [2])}
    assert list(read_header(raw_file(tmp_path / "model.safetensors", entries, bytes(16)))) == ["a", "empty", "b"]


@pytest.mark.parametrize("excess", [2**63, 10**9, 100, 1])
def test_header_longer_than_the_file(tmp_path: Path, excess: int) -> None:
    text = json.dumps({"a": entry()}).encode()
    path = raw_file(tmp_path / "model.safetensors", text, bytes(8), len(text) + 8 + excess)
    with pytest.raises(CheckpointError, match="truncated, or not a safetensors file"):
        read_header(path)


def test_every_truncation_is_noticed(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
            load(folder)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 1199), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_never_reads_outside_the_file(folder: Path, edits: list[tuple[int, int]]) -> None:
    path = folder / "damaged.safetensors"
    data = bytearray((folder / "model.safetensors").read_bytes())
    for position, value in edits:
        data[position] = value
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert all(t.offset >= 8 and t.offset + t.num_bytes <= len(data) for t in tensors.values())


def test_reader_agrees_with_safetensors(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        with reading(checkpoint, name) as mapped:
            assert torch.equal(mapped, tensor)
        assert torch.equal(mapped, tensor)


def test_some_rows_of_a_tensor_are_read(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    entries = {"before": entry("U8", [5], 0, 5), "a": entry("F32", [4, 3], 5, 53)}
    raw_file(tmp_path / "model.safetensors", entries, bytes(5) + values.numpy().tobytes())
    checkpoint = open_checkpoint(tmp_path)
    for first, end in ((0, 4), (0, 1), (1, 3), (3, 4), (2, 2)):
        with checkpoint.reading("a", (first, end)) as data:
            assert bytes(data) == values[first:end].numpy().tobytes()


def test_tensors_without_elements_are_read_where_a_file_has_no_data(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"a": entry("F32", [0, 4], 0, 0)}, b"")
    with reading(open_checkpoint(tmp_path), "a") as tensor:
        assert tensor.shape == (0, 4)


def test_unaligned_tensor(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.5])
    data = bytes(1) + values.numpy().tobytes()
    raw_file(tmp_path / "model.safetensors", {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}, data)
    with reading(open_checkpoint(tmp_path), "b") as tensor:
        assert torch.equal(tensor, values)


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
