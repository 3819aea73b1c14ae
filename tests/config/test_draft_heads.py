"""What a checkpoint's headers say of a draft head; the tensors are small, and no weights are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.checkpoint.draft_heads import (
    EAGLE,
    EAGLE3,
    OUTPUT,
    HeadFormat,
    _find_format,
    _with_one_more_layer,
    own_head,
    resolve_head,
)
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig

VOCAB, WIDTH, LAYERS = 12, 8, 6
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_attention_heads": 2, "vocab_size": VOCAB}
FUSED, FUSED3 = (
    {"fc.weight": (WIDTH, 2 * WIDTH)},
    {"fc.weight": (WIDTH, 3 * WIDTH), "midlayer.hidden_norm.weight": (8,), "norm.weight": (8,)},
)


def write(folder: Path, shapes: dict[str, Any], **changed: Any) -> Path:
    """A checkpoint with tensors of these shapes, or these tensors."""
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.zeros(shape) if isinstance(shape, tuple) else shape for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    return folder


def target_in(tmp_path: Path) -> ModelConfig:
    """The model that heads draft for."""
    values = CONFIG | {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    path = write(tmp_path / "target", {"model.embed_tokens.weight": (VOCAB, WIDTH)}, **values)
    config = replace(ModelConfig.resolve(None), model="target", path=path, vocab_size=VOCAB, max_position_embeddings=99)
    return replace(config, hf_config=HFConfig(values, "target/config.json"), max_model_len=50)


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return target_in(tmp_path)


def of_model(shapes: dict[str, Any], target: ModelConfig) -> HeadFormat:
    """The format of the head in the model's own checkpoint."""
    path = write(target.path, shapes, **target.hf_config)
    format = _find_format(open_checkpoint(path), target.hf_config)
    assert format is not None
    assert own_head(target) == "mtp"
    return format


def with_norms(fc: str) -> dict[str, Any]:
    """A layer for multi-token prediction without its layer of the model's kind."""
    prefix, suffix, norms = MTP_NORMS[fc]
    return {fc: MTP_FC} | {f"{prefix}{norm}{suffix}": (WIDTH,) for norm in norms}


def names(format: HeadFormat, *theirs: str) -> list[str | None]:
    return [format.weight_name(name) for name in theirs]


@pytest.mark.parametrize("format", [EAGLE, EAGLE3])
def test_the_names_of_eagle(format: HeadFormat) -> None:
    theirs = {
        "fc.weight": "fc.weight",
        "fusion_fc.bias": "fc.bias",
        "model.layers.1.mlp.up_proj.weight": "layers.1.mlp.up_proj.weight",
        "midlayer.hidden_norm.weight": "layers.0.hidden_norm.weight",
        "transformer.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
        "embedding_layernorm.weight": "token_norm.weight",
        "hidden_states_layernorm.weight": "state_norm.weight",
        "norm.weight": "out_norm.weight",
        "pre_lm_head_layernorm.weight": "out_norm.weight",
        "lm_head.weight": "lm_head.weight",
        "d2t": None,
        "t2d": None,
        "verifier_lm_head.weight": None,
        "layers.0.self_attn.rotary_emb.inv_freq": None,
    }
    assert names(format, *theirs) == list(theirs.values())
    assert (format.is_state_first, format.passes_norm) == (False, False)


MTP_FC = (WIDTH, 2 * WIDTH)
MTP_NORMS: dict[str, tuple[str, str, list[str]]] = {
    f"model.layers.{LAYERS}.eh_proj.weight": (
        f"model.layers.{LAYERS}.", ".weight", ["enorm", "hnorm", "shared_head.norm"],
    ),
    "model.mtp_linear_proj.0.weight": ("model.mtp_", ".0.weight", ["emb_norm", "hidden_norm"]),
    "model.mtp_layers.0.input_proj.weight": (
        "model.mtp_layers.0.", ".weight", ["token_layernorm", "hidden_layernorm"],
    ),
    "mtp.fc.weight": ("mtp.pre_fc_norm_", ".weight", ["embedding", "hidden"]),
}  # fmt: skip
"""The norms that each format has."""
MTP: dict[str, tuple[str, dict[str, str | None], tuple[bool, bool]]] = {
    "deepseek": (
        f"model.layers.{LAYERS}.eh_proj.weight",
        {
            f"model.layers.{LAYERS}.eh_proj.weight": "fc.weight",
            f"model.layers.{LAYERS}.enorm.weight": "token_norm.weight",
            f"model.layers.{LAYERS}.hnorm.weight": "state_norm.weight",
            f"model.layers.{LAYERS}.shared_head.norm.weight": "out_norm.weight",
            f"model.layers.{LAYERS}.shared_head.head.weight": None,
            f"model.layers.{LAYERS}.embed_tokens.weight": None,
            f"model.layers.{LAYERS}.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
            f"model.layers.{LAYERS - 1}.self_attn.q_proj.weight": None,
            f"model.layers.{LAYERS}0.self_attn.q_proj.weight": None,
            "model.norm.weight": None,
        },
        (False, False),
    ),
    "ernie": (
        "model.mtp_linear_proj.0.weight",
        {
            "model.mtp_linear_proj.0.weight": "fc.weight",
            "model.mtp_emb_norm.0.weight": "token_norm.weight",
            "model.mtp_hidden_norm.0.weight": "state_norm.weight",
            "model.mtp_block.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
            "model.mtp_block.1.mlp.up_proj.weight": None,
            "model.mtp_other.0.weight": None,
        },
        (False, False),
    ),
    "mimo": (
        "model.mtp_layers.0.input_proj.weight",
        {
            "model.mtp_layers.0.input_proj.weight": "fc.weight",
            "model.mtp_layers.0.token_layernorm.weight": "token_norm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight": "state_norm.weight",
            "model.mtp_layers.0.final_layernorm.weight": "norm.weight",
            "model.mtp_layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
            "model.mtp_layers.1.mlp.up_proj.weight": None,
        },
        (True, True),
    ),
    "qwen": (
        "mtp.fc.weight",
        {
            "mtp.fc.weight": "fc.weight",
            "mtp.pre_fc_norm_embedding.weight": "token_norm.weight",
            "mtp.pre_fc_norm_hidden.weight": "state_norm.weight",
            "mtp.norm.weight": "norm.weight",
            "mtp.layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
            "mtp.layers.1.mlp.up_proj.weight": None,
            "model.norm.weight": None,
        },
        (False, True),
    ),
}


@pytest.mark.parametrize("family", MTP)
def test_the_names_of_a_layer_for_multi_token_prediction(family: str, target: ModelConfig) -> None:
    fc, theirs, order = MTP[family]
    shapes = with_norms(fc)
    format = of_model(shapes, target)
    assert names(format, *theirs) == list(theirs.values())
    assert (format.method, format.is_state_first, format.passes_norm) == ("mtp", *order)
    found = resolve_head(target, None, None)
    assert found is not None
    assert found.head is not None
    assert (found.head.format, found.head.held) == (format, set(names(format, *shapes)))
    for norm in shapes.keys() - {fc}:
        write(target.path, {name: shape for name, shape in shapes.items() if name != norm}, **target.hf_config)
        with pytest.raises(CheckpointError, match=f"has no {norm}: it is incomplete$"):
            resolve_head(target, None, None)
    assert (found.architecture, found.path, found.model) == ("LlamaForCausalLM", target.path, "target")
    assert (found.hf_config["num_hidden_layers"], found.hf_config.source) == (LAYERS + 1, "target/config.json")
    assert found.hf_config["layer_types"] == ["full_attention"] * (LAYERS + 1)
    assert own_head(found) is None, "it is the head of another"
    assert own_head(replace(target, runner="pooling")) is None
    assert own_head(replace(target, path=target.path / "m.gguf")) is None


def test_a_model_without_a_head_has_none(target: ModelConfig) -> None:
    assert resolve_head(target, None, None) is None
    assert own_head(target) is None


def test_a_head_has_the_methods_name(tmp_path: Path, target: ModelConfig) -> None:
    eagle, eagle3 = str(write(tmp_path / "a", FUSED)), str(write(tmp_path / "b", FUSED3))
    for name, method in ((eagle, "eagle"), (eagle3, "eagle3")):
        found = resolve_head(target, name, method)
        assert found is not None
        assert found.head is not None
        assert found.head.format.method == method
        assert found == resolve_head(target, name, None)
    for name, method, has in ((eagle, "mtp", "a head for 'eagle'"), (str(target.path), "eagle", "no draft head")):
        with pytest.raises(ConfigError) as raised:
            resolve_head(target, name, method)
        message = (
            f"speculative_config: {name} has {has}, so method='{method}' cannot use it; name a checkpoint with one"
        )
        assert str(raised.value) == f"{message} as 'model'"


def test_the_config_of_a_head(tmp_path: Path, target: ModelConfig) -> None:
    shapes = FUSED | {f"layers.{number}.a": (1,) for number in range(12)}
    folder = write(tmp_path / "head", shapes, n_inner=5)
    quantized = replace(target, quantization="int8", quant_method="fp8", head_quantization="int8")
    found = resolve_head(quantized, str(folder), "eagle")
    assert found is not None
    assert (found.model, found.path, found.architecture) == (str(folder), folder, "LlamaForCausalLM")
    assert (found.quantization, found.quant_method, found.head_quantization) == (None, None, None)
    assert (found.weights_from_file, found.dtype, found.max_model_len) == ("never", target.dtype, 50)
    values = found.hf_config
    assert (values["num_hidden_layers"], values["architectures"], values["max_position_embeddings"]) == (
        12,
        ["LlamaForCausalLM"],
        99,
    )
    assert (values["intermediate_size"], values.source) == (5, str(folder / "config.json"))
    head = found.head
    assert head is not None
    assert (head.state_width, head.places, head.targets, head.has_table, head.has_head) == (
        8,
        (OUTPUT,),
        None,
        False,
        False,
    )
    assert head.held == shapes.keys()


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_of_a_quantized_model_is_quantized_if_its_checkpoint_is(
    own: bool, tmp_path: Path, target: ModelConfig
) -> None:
    section = {"quant_method": "fp8"}
    target = replace(target, quantization="fp8", quant_method="fp8")
    target = replace(target, hf_config=target.hf_config.replaced({"quantization_config": section}))
    folder = write(tmp_path / "mtp", with_norms("mtp.fc.weight"), **({"quantization_config": section} if own else {}))
    found = resolve_head(target, str(folder), "mtp")
    assert found is not None
    expected = "fp8" if own else None
    assert (found.quantization, found.quant_method, found.model) == (expected, expected, str(folder))
    of_file = resolve_head(replace(target, path=tmp_path / "m.gguf"), str(folder), "mtp")
    assert of_file is not None
    assert of_file.quant_method is None


@pytest.mark.parametrize(
    ("stated", "architecture"),
    [
        (["LlamaForCausalLMEagle3"], "LlamaForCausalLM"),
        (["EagleLlamaForCausalLM"], "LlamaForCausalLM"),
        (["Eagle3Qwen3ForCausalLM"], "Qwen3ForCausalLM"),
        (["LlamaForCausalLMEagle"], "LlamaForCausalLM"),
        ("Qwen3ForCausalLM", "LlamaForCausalLM"),
        ([], "LlamaForCausalLM"),
        ([3], "LlamaForCausalLM"),
        (None, "LlamaForCausalLM"),
    ],
)
def test_the_architecture_of_a_heads_layers(
    stated: Any, architecture: str, tmp_path: Path, target: ModelConfig
) -> None:
    found = resolve_head(target, str(write(tmp_path / "head", FUSED, architectures=stated)), None)
    assert found is not None
    assert (found.architecture, found.hf_config["architectures"]) == (architecture, [architecture])


def test_the_format_of_speculators_has_the_layers_values_in_a_section(tmp_path: Path, target: ModelConfig) -> None:
    layers = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 7}
    folder = write(tmp_path / "a", FUSED, hidden_size=3, transformer_layer_config=layers)
    found = resolve_head(target, str(folder), None)
    assert found is not None
    assert (found.architecture, found.hf_config["hidden_size"]) == ("Qwen3ForCausalLM", WIDTH)
    assert (found.hf_config["norm_before_residual"], found.hf_config["max_position_embeddings"]) == (True, 7)
    folder = write(tmp_path / "b", FUSED, norm_before_residual=False, transformer_layer_config=layers)
    found = resolve_head(target, str(folder), None)
    assert found is not None
    assert found.hf_config["norm_before_residual"] is False


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}, (0, 1, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (1, 2, 3)),
        ({"eagle_config": {}}, (2, 3, 3)),
    ],
)
def test_the_layers_whose_states_eagle3_reads(
    values: dict[str, Any], places: tuple[int, ...], tmp_path: Path, target: ModelConfig
) -> None:
    found = resolve_head(target, str(write(tmp_path / "head", FUSED3, **values)), None)
    assert found is not None
    assert found.head is not None
    assert found.head.places == places


def test_the_fewest_layers_of_a_model_for_eagle3(tmp_path: Path, target: ModelConfig) -> None:
    head = str(write(tmp_path / "head", FUSED3))
    found = resolve_head(replace(target, hf_config=target.hf_config.replaced({"num_hidden_layers": 3})), head, None)
    assert found is not None
    assert found.head is not None
    assert found.head.places == (2, 1, 0)
    with pytest.raises(CheckpointError, match=r"json: EAGLE-3 needs a model of 3 layers or more, not of 2$"):
        resolve_head(replace(target, hf_config=target.hf_config.replaced({"num_hidden_layers": 2})), head, None)


def test_a_head_may_draft_some_of_the_tokens(tmp_path: Path, target: ModelConfig) -> None:
    shapes = FUSED3 | {
        "d2t": torch.tensor([0, 2, 9]),
        "lm_head.weight": (3, WIDTH),
        "embed_tokens.weight": (VOCAB, WIDTH),
    }
    found = resolve_head(target, str(write(tmp_path / "head", shapes)), None)
    assert found is not None
    assert found.head is not None
    assert (found.head.format.method, found.head.targets) == ("eagle3", (0, 3, 11))
    assert (found.head.has_table, found.head.has_head) == (True, True)


def test_a_head_with_embeddings_of_its_own_may_be_narrower(tmp_path: Path, target: ModelConfig) -> None:
    own = {"fc.weight": (4, 4 + WIDTH), "embed_tokens.weight": (VOCAB, 4), "lm_head.weight": (VOCAB, 4)}
    found = resolve_head(target, str(write(tmp_path / "head", own, hidden_size=4)), None)
    assert found is not None
    for left_out in ("embed_tokens.weight", "lm_head.weight"):
        shapes = {name: shape for name, shape in own.items() if name != left_out}
        with pytest.raises(CheckpointError, match=r"shares the model's embeddings, so its hidden_size 4 must be 8$"):
            resolve_head(target, str(write(tmp_path / "head", shapes, hidden_size=4)), None)


@pytest.mark.parametrize("named", [[6], [-1], [True], ["1"], {"0": 1}, 3])
def test_layers_that_the_model_does_not_have(named: Any, tmp_path: Path, target: ModelConfig) -> None:
    folder = write(tmp_path / "head", FUSED3, eagle_aux_hidden_state_layer_ids=named)
    message = "'eagle_aux_hidden_state_layer_ids' must be a list of layers' numbers below 6$"
    with pytest.raises(CheckpointError, match=f"^{folder}/config.json: {message}"):
        resolve_head(target, str(folder), None)


def test_heads_that_quire_does_not_run(tmp_path: Path, target: ModelConfig) -> None:
    name = "x" * 99
    folder = str(write(tmp_path / "head", FUSED, architectures=[name]))
    with pytest.raises(UnsupportedModelError, match=f"json: a draft head of the architecture '{name[:80]}' is not sup"):
        resolve_head(target, folder, None)
    with pytest.raises(
        ConfigError, match=r"^speculative_config: a draft head needs a model that Quire runs itself, not"
    ):
        resolve_head(replace(target, model_impl="transformers"), folder, None)
    file = replace(target, path=tmp_path / "m.gguf")
    assert resolve_head(file, None, None) is None
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: draft heads are read from safetensors, not from GGUF"):
        resolve_head(file, None, "mtp")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"moe_layer_end_index": 2}),
        ({"moe_layer_end_index": -1}, {"moe_layer_end_index": 2}),
        ({"moe_layer_end_index": 1}, {"moe_layer_end_index": 1}),
        ({"mlp_layer_types": ["a", "b", "c"]}, {"mlp_layer_types": ["a", "b", "c", "c"], "moe_layer_end_index": 2}),
        ({"layer_types": ["a", "b"]}, {"layer_types": ["a", "b"], "moe_layer_end_index": 2}),
        ({"layer_types": None}, {"layer_types": None, "moe_layer_end_index": 2}),
    ],
)
def test_the_config_of_a_model_with_one_more_layer(values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = _with_one_more_layer(HFConfig({"num_hidden_layers": 3, **values}, "c"))
    assert (dict(found), found.source) == ({"num_hidden_layers": 4, **expected}, "c")
