"""ModelConfig.resolve and load_model: dtypes, shards, names, downloads, and what both leave alone."""

import json
import logging
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS
from quire.config.kv_cache import FullAttentionSpec, SlidingWindowSpec
from quire.config.model import ModelConfig
from quire.models.registry import model_class
from quire.models.weights.loader import load_model, weight_bytes

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
PROMPT = [5, 60, 3, 3, 17, 40, 8]


def logits_of(config: ModelConfig, paged_run: Any) -> torch.Tensor:
    logits: torch.Tensor = paged_run(load_model(config), config, [PROMPT]).step([len(PROMPT)])[0]
    return logits


# --- dtypes

# bfloat16 keeps 8 bits: each of a few dozen roundings adds up to 2^-9 of the largest logit.
BFLOAT16_TOLERANCE = 0.05


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_every_stored_dtype_computes_in_every_dtype(
    stored: torch.dtype, dtype: str, save_checkpoint: Any, paged_run: Any
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", dtype=stored, **LLAMA)
    oracle = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = ModelConfig.resolve(folder, dtype=dtype)
    assert config.checkpoint_dtype == str(stored).removeprefix("torch.")
    if dtype == "auto":
        assert config.dtype == ("float32" if stored == torch.float32 else "bfloat16")
    assert model_class(config.architecture).kv_cache_specs(config)[0].dtype == config.dtype
    with torch.no_grad():
        theirs = oracle(torch.tensor([PROMPT])).logits[0]
    tolerance = 5e-5 if config.dtype == "float32" else BFLOAT16_TOLERANCE
    assert (logits_of(config, paged_run) - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_bfloat16_logits_differ_from_float32(save_checkpoint: Any, paged_run: Any) -> None:
    """The tolerance above is not met by computing in float32 in secret."""
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    in_float32, in_bfloat16 = (
        logits_of(ModelConfig.resolve(folder, dtype=dtype), paged_run) for dtype in ("float32", "bfloat16")
    )
    assert (in_float32 - in_bfloat16).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("asked", "used"),
    [("float32", "float32"), ("float", "float32"), ("bf16", "bfloat16"), ("float16", "bfloat16"), ("half", "bfloat16")],
)
def test_dtype_names(asked: str, used: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        assert ModelConfig.resolve(None, dtype=asked).dtype == used
    assert ("computing in bfloat16" in caplog.text) == (asked in ("float16", "half"))


def test_float16_checkpoint_says_what_it_computes_in(save_checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", dtype=torch.float16, **LLAMA)
    with caplog.at_level(logging.INFO, "quire"):
        ModelConfig.resolve(folder)
    assert "float16 weights: computing in bfloat16" in caplog.text


@pytest.mark.parametrize("dtype", ["int8", "bflaot16", ""])
def test_unknown_dtype(dtype: str) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, "):
        ModelConfig.resolve(None, dtype=dtype)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_dtype_under_either_key_or_from_the_weights(key: str | None, save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", dtype=torch.bfloat16, **LLAMA)
    edit(folder, lambda fields: fields.pop("dtype"), {key: "torch.bfloat16"} if key else {})
    assert ModelConfig.resolve(folder).checkpoint_dtype == "bfloat16"


def edit(folder: Path, change: Any = lambda fields: None, add: dict[str, Any] | None = None) -> None:
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields | (add or {})))


# --- weights


def test_shards_hold_the_same_model(save_checkpoint: Any, paged_run: Any) -> None:
    folder, oracle = save_checkpoint("LlamaForCausalLM", max_shard_size="20KB", **LLAMA)
    assert len(list(folder.glob("*.safetensors"))) > 2
    with torch.no_grad():
        theirs = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(ModelConfig.resolve(folder), paged_run) - theirs).abs().max() <= 5e-5 * theirs.abs().max()


def test_base_model_names_without_prefix(save_checkpoint: Any, paged_run: Any) -> None:
    """OPT checkpoints of the first releases name their weights `decoder.`, not `model.decoder.`."""
    import safetensors.torch

    fields = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder, _ = save_checkpoint("OPTForCausalLM", max_position_embeddings=32, **fields)
    config = ModelConfig.resolve(folder)
    before = logits_of(config, paged_run)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, folder / "model.safetensors")
    assert torch.equal(logits_of(config, paged_run), before)


def test_weight_bytes_are_those_of_the_compute_dtype_and_of_norms_in_float32(save_checkpoint: Any) -> None:
    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA)
    num_weights = sum(parameter.numel() for parameter in oracle.parameters())
    num_norms = sum(parameter.numel() for parameter in oracle.parameters() if parameter.dim() == 1)
    assert weight_bytes(ModelConfig.resolve(folder)) == 4 * num_weights
    assert weight_bytes(ModelConfig.resolve(folder, dtype="bfloat16")) == 2 * num_weights + 2 * num_norms


def test_tied_table_is_kept_once(save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA, tie_word_embeddings=True)
    model: Any = load_model(ModelConfig.resolve(folder))
    assert model.lm_head.embedding is model.embed_tokens
    assert [name for name, _ in model.weighted_layers() if "head" in name] == []


def test_untied_table_stays_mapped(save_checkpoint: Any) -> None:
    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA)
    model: Any = load_model(ModelConfig.resolve(folder))
    assert torch.equal(model.embed_tokens.table, oracle.model.embed_tokens.weight)
    maps = Path("/proc/self/maps")
    if maps.exists():
        address = model.embed_tokens.table.data_ptr()
        spans = [line.split() for line in maps.read_text().splitlines() if str(folder) in line]
        assert any(int(span.split("-")[0], 16) <= address < int(span.split("-")[1], 16) for span, *_ in spans)


def test_opening_a_checkpoint_reads_headers_only(tmp_path: Path) -> None:
    """A terabyte of (sparse) weights opens at once."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + 2**40)
    assert open_checkpoint(tmp_path).tensors["a"].num_bytes == 2**40


def test_loading_takes_hardly_more_memory_than_the_weights(tmp_path: Path) -> None:
    """75 MiB of (sparse, zero) weights, stacked and packed, without a second copy of them all at any time."""
    size, width, num_layers = 512, 2048, 9
    parts = {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
    parts |= {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    parts |= {"mlp.gate_proj": (width, size), "mlp.up_proj": (width, size), "mlp.down_proj": (size, width)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (64, size), "norm.weight": (size,)}
    shapes |= {f"layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in parts.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    fields = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": size, "intermediate_size": width}
    fields |= {"num_hidden_layers": num_layers, "num_attention_heads": 8, "max_position_embeddings": 64}
    fields |= {"tie_word_embeddings": True, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(tmp_path / "model.safetensors", 8 + len(text) + end)
    program = f"""
import resource
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model
load_model(ModelConfig.resolve(None))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(ModelConfig.resolve({str(tmp_path)!r}))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert int(run.stdout) < 1.2 * end


# --- what config.json and its neighbours say


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, {2}), (2, 7, {7}), (2, [7, 9], {7, 9}), ([3, 4], None, {3, 4}), (None, None, set())],
)
def test_eos_token_ids(config_eos: Any, generation_eos: Any, expected: set[int], save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    edit(folder, add={"eos_token_id": config_eos})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert ModelConfig.resolve(folder).eos_token_ids == expected


def test_missing_generation_config_is_empty(save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    (folder / "generation_config.json").unlink()
    config = ModelConfig.resolve(folder)
    assert dict(config.generation_config) == {}
    assert config.eos_token_ids == {2}


def test_remote_code_is_ignored_with_a_warning(save_checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    edit(folder, add={"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    ModelConfig.resolve(folder)
    assert "never run" in caplog.text


@pytest.mark.parametrize("nested", [True, False])
def test_rope_parameters_under_either_key(nested: bool, save_checkpoint: Any, paged_run: Any) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA, rope_parameters=scaling | {"rope_theta": 300.0})
    if not nested:
        old = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 300.0}
        edit(folder, lambda fields: fields.pop("rope_parameters"), old)
    with torch.no_grad():
        theirs = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(ModelConfig.resolve(folder), paged_run) - theirs).abs().max() <= 5e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_longest_context_counts_the_stretch(rope: dict[str, Any], longest: int, save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    edit(folder, add={"rope_parameters": rope | {"rope_theta": 100.0}})
    config = ModelConfig.resolve(folder)
    assert config.max_context_len == longest
    assert config.max_model_len == config.max_position_embeddings == 64


def test_sliding_windows_reach_the_cache_specs(save_checkpoint: Any) -> None:
    fields = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    folder, _ = save_checkpoint("Qwen2ForCausalLM", **LLAMA, **fields)
    edit(folder, lambda fields: fields.pop("layer_types"))  # older configs have max_window_layers alone
    config = ModelConfig.resolve(folder)
    specs = model_class(config.architecture).kv_cache_specs(config)
    assert specs == [FullAttentionSpec(2, 8, "float32"), SlidingWindowSpec(2, 8, "float32", 9)]


def test_mistral_without_the_key_has_the_published_window(save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("MistralForCausalLM", **LLAMA)
    for change, window in ((lambda fields: fields.pop("sliding_window"), 4096), (lambda fields: None, None)):
        edit(folder, change, {} if window else {"sliding_window": None})
        config = ModelConfig.resolve(folder)
        assert {
            getattr(spec, "sliding_window", None) for spec in model_class(config.architecture).kv_cache_specs(config)
        } == {window}


# --- where checkpoints come from


@pytest.mark.parametrize("name", EMBEDDED_CHECKPOINTS)
def test_embedded_checkpoints_load(name: str, paged_run: Any) -> None:
    config = ModelConfig.resolve(name)
    assert config.model == name
    assert config.eos_token_ids == {0, 2}
    assert logits_of(config, paged_run).shape == (len(PROMPT), config.vocab_size)


def test_no_name_means_quire_tiny() -> None:
    assert ModelConfig.resolve(None) == ModelConfig.resolve("quire-tiny")


def test_local_checkpoints_never_touch_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("network used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    load_model(ModelConfig.resolve(ModelConfig.resolve(None).path, tokenizer="quire-draft"))


def test_hub_id_is_downloaded_without_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    embedded = str(ModelConfig.resolve(None).path)

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return embedded

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = ModelConfig.resolve("some/model", tokenizer="some/tokenizer", revision="v2", download_dir=tmp_path)
    assert (config.model, str(config.path)) == ("some/model", embedded)
    (_, first_options), (model, model_options), (tokenizer, tokenizer_options) = calls
    assert (model, tokenizer) == ("some/model", "some/tokenizer")
    assert wanted(first_options, "config.json", "model.safetensors") == [True, False]
    assert (model_options["revision"], model_options["cache_dir"]) == ("v2", tmp_path)
    assert (tokenizer_options["revision"], tokenizer_options["cache_dir"]) == (None, tmp_path)
    assert wanted(model_options, "model-00001-of-00002.safetensors", "config.json", "chat_template.jinja") == [True] * 3
    refused = ["pytorch_model.bin", "model.pt", "model.pkl", "modeling_x.py", "original/m.safetensors", "onnx/x.json"]
    assert not any(wanted(model_options, *refused))
    assert wanted(tokenizer_options, "tokenizer.json", "model.safetensors") == [True, False]


def test_the_weights_of_an_unsupported_model_are_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["CTRLLMHeadModel"]}')
    calls: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        calls.append(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UnsupportedModelError, match="CTRLLMHeadModel"):
        ModelConfig.resolve("some/model")
    assert [wanted(options, "config.json", "model.safetensors") for options in calls] == [[True, False]]


def wanted(options: dict[str, Any], *files: str) -> list[bool]:
    """What huggingface_hub makes of the patterns."""
    kept = list(
        huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
    )
    return [file in kept for file in files]


def test_failed_download_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder 'no-such-org/no-such-model'.*hub"):
        ModelConfig.resolve("no-such-org/no-such-model", download_dir=tmp_path)


def test_resolving_imports_no_torch() -> None:
    program = "import sys; from quire.config.model import ModelConfig; ModelConfig.resolve(None)"
    program += "; sys.exit(bool({'torch', 'huggingface_hub', 'numpy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
