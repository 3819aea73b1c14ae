"""What config.json and its neighbours say of a model, and what is taken where they say nothing."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config import model as model_module
from quire.config.checkpoint.location import is_downloadable
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig, rope_config

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM", "Other"],
    "dtype": "float32",
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def write(folder: Path, **changes: Any) -> Path:
    """A checkpoint without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FIELDS | changes))
    return folder


def write_weights(folder: Path, **dtypes: str) -> None:
    """One element for each of these names, in its dtype."""
    header, end = {}, 0
    for name, dtype in dtypes.items():
        num_bytes = 8 if dtype.endswith("64") else 2 if dtype.endswith("16") else 4
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_a_checkpoint_is_described_by_its_config(tmp_path: Path) -> None:
    config = ModelConfig.resolve(write(tmp_path, num_hidden_layers=4096))
    assert (config.model, config.path, config.tokenizer_path) == (str(tmp_path), tmp_path, tmp_path)
    assert (config.architecture, config.vocab_size) == ("LlamaForCausalLM", 16)
    assert (config.max_position_embeddings, config.max_context_len, config.max_model_len) == (64, 64, 64)
    assert (config.dtype, config.checkpoint_dtype) == ("float32", "float32")
    assert (config.quantization, config.quant_method) == (None, None)
    assert (dict(config.generation_config), config.eos_token_ids) == ({}, frozenset())
    assert config.hf_config["hidden_size"] == 8


def test_the_tokenizer_may_be_in_another_folder(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = ModelConfig.resolve(write(tmp_path / "model"), tokenizer=other)
    assert (config.path, config.tokenizer_path) == (tmp_path / "model", other)


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", [], [5], None, {"0": "LlamaForCausalLM"}])
def test_the_architecture_is_the_first_of_a_list_of_names(tmp_path: Path, architectures: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: 'architectures' is .* must be a list"):
        ModelConfig.resolve(write(tmp_path, architectures=architectures))


def test_errors_in_the_generation_config_name_its_file(tmp_path: Path) -> None:
    (write(tmp_path) / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.resolve(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: 'eos_token_id' is 'x'")


@pytest.mark.parametrize(
    ("config", "generation", "known", "source", "wrong"),
    [
        ([15, 16], None, {15}, "config.json", "16"),
        (3, 99, set(), "generation_config.json", "99"),
        (99, [2, 1000, 16], {2}, "generation_config.json", "16, 1000"),
        (99, 15, {15}, None, None),
    ],
)
def test_ends_outside_the_vocabulary_are_ignored_with_a_warning(
    tmp_path: Path,
    config: Any,
    generation: Any,
    known: set[int],
    source: str | None,
    wrong: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write(tmp_path, eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert ModelConfig.resolve(folder).eos_token_ids == known
    message = f"ignored as they are outside the vocabulary of 16 tokens: {wrong} of 'eos_token_id'"
    assert caplog.messages == ([] if source is None else [f"{folder / source}: {message}"])


# The dtype


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None}, "float32"),
    ],
)
def test_the_dtype_is_stated_under_either_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert ModelConfig.resolve(write(tmp_path, **changes)).checkpoint_dtype == expected


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({"a": "BF16"}, "bfloat16"),
        ({"a": "I64", "b": "F16", "c": "F32"}, "float16"),
        ({"a": "F64"}, "float32"),
        ({"a": "I64"}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_dtype_is_otherwise_that_of_the_first_weight_of_numbers(
    tmp_path: Path, dtypes: dict[str, str], expected: str
) -> None:
    write_weights(write(tmp_path, dtype=None), **dtypes)
    assert ModelConfig.resolve(tmp_path).checkpoint_dtype == expected


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^dtype='int9'"):
        ModelConfig.resolve(write(tmp_path), dtype="int9")


@pytest.mark.parametrize(
    ("stored", "asked", "said"),
    [
        ("float32", "auto", None),
        ("bfloat16", "auto", None),
        ("float16", "float32", None),
        ("float16", "auto", "{name} holds float16 weights: computing in bfloat16"),
        ("float32", "half", "dtype=half: computing in bfloat16"),
    ],
)
def test_a_computation_in_another_dtype_than_float16_is_logged(
    tmp_path: Path, stored: str, asked: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        config = ModelConfig.resolve(write(tmp_path, dtype=stored), dtype=asked)
    assert config.dtype == ("bfloat16" if said or stored == "bfloat16" else "float32")
    if said is None:
        assert caplog.messages == []
    else:
        (message,) = caplog.messages
        assert message.startswith(said.format(name=tmp_path))


# The quantization


@pytest.mark.parametrize("stated", [None, {}])
def test_weights_are_plain_where_no_quantization_is_stated(tmp_path: Path, stated: Any) -> None:
    config = ModelConfig.resolve(write(tmp_path, quantization_config=stated), quantization="int4")
    assert (config.quantization, config.quant_method) == ("int4", None)


def test_weights_that_quire_quantized_need_no_argument(tmp_path: Path) -> None:
    stated = {"quant_method": "quire", "format": "int8", "version": 3}
    config = ModelConfig.resolve(write(tmp_path, quantization_config=stated))
    assert (config.quantization, config.quant_method) == ("int8", "quire")


@pytest.mark.parametrize(("stated", "shown"), [({"bits": 4}, ""), ({"quant_method": "a" * 100}, "a" * 80)])
def test_a_quantization_by_another_tool_is_refused_by_name(tmp_path: Path, stated: Any, shown: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.resolve(write(tmp_path, quantization_config=stated))
    place = f"{tmp_path / 'config.json'}: quantization_config"
    assert str(caught.value).startswith(f"{place}: the weights are quantized with the method {shown!r}; ")


def test_a_quantization_is_an_object(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'quantization_config' is 'int8', but must be an object"):
        ModelConfig.resolve(write(tmp_path, quantization_config="int8"))


# The rotary embedding


@pytest.mark.parametrize(
    ("fields", "expected", "source"),
    [
        ({}, {}, "rope"),
        ({"rope_theta": 5.0, "partial_rotary_factor": 0.5}, {"rope_theta": 5.0, "partial_rotary_factor": 0.5}, "rope"),
        (
            {"rope_parameters": {"rope_theta": 6.0, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
            {"rope_theta": 6.0, "partial_rotary_factor": 0.25},
            "rope_parameters",
        ),
        ({"rope_scaling": {"type": "linear"}}, {"type": "linear", "rope_type": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "su"}}, {"type": "su", "rope_type": "longrope"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope"}}, {"rope_type": "longrope"}, "rope_scaling"),
        (
            {"rope_scaling": {"original_max_position_embeddings": 16}},
            {"original_max_position_embeddings": 16},
            "rope_scaling",
        ),
        (
            {"rope_scaling": {"original_max_position_embeddings": 16}, "original_max_position_embeddings": 32},
            {"original_max_position_embeddings": 32},
            "rope_scaling",
        ),
    ],
)
def test_the_rotary_embedding_is_described_whole(fields: dict[str, Any], expected: dict[str, Any], source: str) -> None:
    rope = rope_config(HFConfig({"max_position_embeddings": 64} | fields, "config.json"))
    defaults = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    assert dict(rope) == defaults | {"original_max_position_embeddings": 64} | expected
    assert rope.source == f"config.json: {source}"


def test_each_type_of_layer_may_have_a_rotary_embedding() -> None:
    kinds = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
    hf = HFConfig({"max_position_embeddings": 64, "rope_parameters": kinds}, "config.json")
    assert (rope_config(hf)["rope_theta"], rope_config(hf, "sliding_attention")["rope_theta"]) == (5.0, 7.0)
    with pytest.raises(CheckpointError, match="no 'chunked_attention': this checkpoint is incomplete"):
        rope_config(hf, "chunked_attention")


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "yarn"])
def test_without_a_factor_the_longest_context_is_not_stretched(tmp_path: Path, rope_type: str) -> None:
    config = ModelConfig.resolve(write(tmp_path, rope_scaling={"rope_type": rope_type}))
    assert config.max_context_len == 64


def test_only_an_id_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "here").mkdir(parents=True)
    names = ("someone/model", "someone/here", "quire-tiny", str(tmp_path), "../up")
    assert [is_downloadable(name) for name in names] == [True, False, False, False, False]


# What a caller chooses


def test_how_the_model_is_run_is_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, quantization_config={"quant_method": "quire", "format": "int8", "version": 3})
    defaults = ModelConfig.resolve(write(tmp_path / "plain"))
    assert (defaults.model_impl, defaults.head_quantization, defaults.weights_from_file) == ("quire", None, "auto")
    assert (defaults.runner, defaults.convert) == ("generate", "none")
    chosen = ModelConfig.resolve(
        folder, model_impl="quire", head_quantization="int8", weights_from_file="always", runner="pooling",
        convert="embed",
    )  # fmt: skip
    assert (chosen.model_impl, chosen.head_quantization, chosen.weights_from_file) == ("quire", "int8", "always")
    assert (chosen.runner, chosen.convert) == ("pooling", "embed")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_quantization": "int4"}, "head_quantization='int4'.* .allowed: int8."),
        ({"weights_from_file": "some"}, "weights_from_file='some'.* .allowed: "),
        ({"runner": "classify"}, "runner='classify'"),
        (
            {"weights_from_file": "always"},
            "weights_from_file='always': the files of .*model do not have the matrices as the kernels read them; save "
            "them so with `quire quantize .*model FOLDER --quantization int4`",
        ),
    ],
)
def test_wrong_choices_are_refused_by_name(tmp_path: Path, given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        ModelConfig.resolve(write(tmp_path / "model"), **given)


@pytest.mark.parametrize(("max_seq_length", "length"), [(None, 64), (9, 9), (99, 64)])
def test_texts_that_are_pooled_are_as_long_as_the_model_was_trained_for(
    tmp_path: Path, max_seq_length: int | None, length: int
) -> None:
    write(tmp_path)
    if max_seq_length is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    assert ModelConfig.resolve(tmp_path, runner="pooling").max_model_len == length
    assert ModelConfig.resolve(tmp_path).max_model_len == 64


def test_a_folder_of_an_embedder_pools_without_being_asked(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert ModelConfig.resolve(tmp_path).runner == "pooling"


def test_only_quires_own_models_stretch_their_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write(tmp_path, rope_scaling=rope)
    assert ModelConfig.resolve(tmp_path).max_context_len == 128
    monkeypatch.setattr(model_module, "implementation", lambda hf, _: ("LlamaForCausalLM", "transformers", hf))
    assert ModelConfig.resolve(tmp_path).max_context_len == 64


def test_of_a_gguf_file_header_and_sampling_defaults_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    read = {"gguf": {}, "values": HFConfig(FIELDS, str(path)), "generation": HFConfig({"eos_token_id": 7}, str(path))}
    header = object()
    monkeypatch.setattr(model_module, "read_gguf", lambda given: read["gguf"].setdefault(given, header))
    for name, key in (("hf_values", "values"), ("generation_values", "generation")):
        monkeypatch.setattr(model_module, name, lambda given, key=key: read[key] if given is header else None)
    config = ModelConfig.resolve(path)
    assert read["gguf"] == {path: header}
    assert (config.vocab_size, config.eos_token_ids) == (16, {7})
    assert dict(config.generation_config) == {"eos_token_id": 7}


def test_one_of_several_gguf_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[tuple[Any, ...]] = []

    class Located(model_module.Location):
        def __init__(self, *given: Any) -> None:
            located.append(given)
            super().__init__(*given)

    monkeypatch.setattr(model_module, "Location", Located)
    write(tmp_path)
    with pytest.raises((CheckpointError, ConfigError)):
        ModelConfig.resolve(tmp_path, gguf_file="a.gguf", revision="v1", download_dir="d")
    assert located == [(str(tmp_path), "a.gguf", "v1", "d")]
