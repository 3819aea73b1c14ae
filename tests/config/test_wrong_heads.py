"""Checkpoints of draft heads that are incomplete, or whose config.json contradicts their tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.common.errors import CheckpointError
from quire.config.checkpoint.draft_heads import resolve_head
from quire.config.model import ModelConfig

from .test_draft_heads import CONFIG, FUSED, FUSED3, VOCAB, WIDTH, target_in, with_norms, write


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return target_in(tmp_path)


EAGLE_LAYER = {"layers.0.post_attention_layernorm.weight": (WIDTH,), "embed_tokens.weight": (VOCAB, WIDTH)}


@pytest.mark.parametrize(
    ("shapes", "values", "inputs"),
    [
        (EAGLE_LAYER, {}, 2),
        ({"lm_head.weight": (VOCAB, WIDTH)}, {"architectures": ["LlamaForCausalLMEagle"]}, 2),
        ({"lm_head.weight": (VOCAB, WIDTH)}, {"architectures": ["Eagle3LlamaForCausalLM"]}, 3),
        ({"lm_head.weight": (VOCAB, WIDTH)}, {"speculators_model_type": "eagle"}, 2),
        ({"midlayer.hidden_norm.weight": (WIDTH,)}, {}, 3),
    ],
    ids=range(5),
)
def test_a_head_without_fc_is_incomplete(
    shapes: dict[str, Any], values: dict[str, Any], inputs: int, tmp_path: Path, target: ModelConfig
) -> None:
    folder = write(tmp_path / "head", shapes, **values)
    said = rf"this draft head has no fc.weight, which must be \[8, {inputs * WIDTH}\]: it is incomplete$"
    for method in (None, "eagle" if inputs == 2 else "eagle3"):
        with pytest.raises(CheckpointError, match=f"^{folder}/config.json: {said}"):
            resolve_head(target, str(folder), method)


@pytest.mark.parametrize("method", [None, "eagle"])
def test_a_pickled_head_is_converted_in_another_way_than_a_model(
    method: str | None, tmp_path: Path, target: ModelConfig
) -> None:
    folder = write(tmp_path / "head", FUSED)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    way = r'safetensors.torch.save_file\(torch.load\("pytorch_model.bin", weights_only=True\), "model.safetensors"\)'
    with pytest.raises(CheckpointError, match=f"run code; .* a draft head by {way}, a model by transformers"):
        resolve_head(target, str(folder), method)


def test_a_model_is_no_head_without_fc(tmp_path: Path, target: ModelConfig) -> None:
    for name in ("norm.weight", "model.norm.weight"):
        layer = "model.layers" if name.startswith("model.") else "layers"
        shapes = {f"{layer}.0.post_attention_layernorm.weight": (WIDTH,), name: (WIDTH,)}
        assert resolve_head(target, str(write(tmp_path / "model", shapes)), None) is None


@pytest.mark.parametrize(
    ("shapes", "values", "message"),
    [
        (FUSED, {"vocab_size": VOCAB + 1}, "'vocab_size' is 13, but .* for have 12: take a head that was trained for"),
        (FUSED, {"num_hidden_layers": 2}, "'num_hidden_layers' is 2, but .* for have 1: take"),
        (FUSED, {"draft_vocab_size": 3}, "'draft_vocab_size' is 3, but .* for have 12: take"),
        (FUSED3, {"target_hidden_size": 9}, "'target_hidden_size' is 9, but .* for have 8: take"),
        (FUSED, {"num_hidden_layers": "1"}, "'num_hidden_layers' is '1', but must be an integer from 1"),
        (FUSED3, {"transformer_layer_config": CONFIG | {"num_hidden_layers": 6}}, "'num_hidden_layers' is 6, but"),
        (FUSED3, {"transformer_layer_config": CONFIG | {"vocab_size": 5}}, "'vocab_size' is 5, but"),
        (with_norms("mtp.fc.weight"), {"vocab_size": 13}, "'vocab_size' is 13, but .* for have 12: take"),
    ],
    ids=range(8),
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    shapes: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path, target: ModelConfig
) -> None:
    folder = write(tmp_path / "head", shapes, **values)
    with pytest.raises(CheckpointError, match=f"^{folder}/config.json: {message}"):
        resolve_head(target, str(folder), None)


def test_a_config_may_state_what_the_tensors_have(tmp_path: Path, target: ModelConfig) -> None:
    some = {"d2t": torch.arange(3), "lm_head.weight": (3, WIDTH), **FUSED3}
    stated = {"num_hidden_layers": 1, "vocab_size": VOCAB, "draft_vocab_size": 3, "target_hidden_size": WIDTH}
    for values in (stated, dict.fromkeys(stated), {**stated, "transformer_layer_config": CONFIG}):
        assert resolve_head(target, str(write(tmp_path / "head", some, **values)), "eagle3") is not None


SOME = {"lm_head.weight": (3, WIDTH), **FUSED3}


@pytest.mark.parametrize(
    ("shapes", "values", "message"),
    [
        (
            {"model.fc.bias": (8,)},
            {},
            r"has no fc.weight, which must be \[8, 16\]: it is incomplete$",
        ),
        ({"fc.weight": (8, 15)}, {}, r"has fc.weight \[8, 15\], where hidden states of 8 elements need \[8, 16\]; it"),
        (FUSED3 | FUSED, {}, r"has fc.weight \[8, 16\], where hidden states of 8 elements need \[8, 24\]; it was"),
        (
            FUSED | {"embed_tokens.weight": (11, 8)},
            {},
            r"has embed_tokens.weight \[11, 8\] instead of \[12, 8\]: other",
        ),
        (FUSED | {"lm_head.weight": (12, 7)}, {}, r"has lm_head.weight \[12, 7\] instead of \[12, 8\]: other tokens$"),
        (SOME | {"d2t": torch.arange(4)}, {}, r"has lm_head.weight \[3, 8\] instead of \[4, 8\]: other tokens$"),
        (FUSED3 | {"d2t": torch.arange(3)}, {}, "drafts 3 tokens, but has no lm_head.weight$"),
        (SOME | {"d2t": torch.zeros(3)}, {}, r"has d2t float32 \[3\] instead of a non-empty list of int64$"),
        (SOME | {"d2t": torch.zeros(0).long()}, {}, r"has d2t int64 \[0\] instead of a non-empty list of int64$"),
        (SOME | {"d2t": torch.zeros(3, 1).long()}, {}, r"has d2t int64 \[3, 1\] instead of a non-empty list of int64$"),
        (SOME | {"d2t": torch.tensor([0, 0, 10])}, {}, "has d2t for the token 12, but the model has 12 tokens$"),
        (SOME | {"d2t": torch.tensor([-1, 0, 0])}, {}, "has d2t for the token -1, but the model has 12 tokens$"),
        (FUSED | {"layers.99999.a": (1,)}, {}, "has a layer '99999', but not all from 0 on before it$"),
        (FUSED | {"layers.0.a": (1,), "layers.2.a": (1,)}, {}, "has a layer '2', but not all from 0 on before"),
        (FUSED | {f"layers.{number}.a": (1,) for number in range(17)}, {}, "has 17 layers, more than 16$"),
        (SOME | {"d2t": torch.arange(13)}, {}, "has d2t for 13 tokens, but the model has 12$"),
        ({name: FUSED3[name] for name in FUSED3 if name != "norm.weight"}, {}, "has no norm.weight: it is incomplete$"),
        (FUSED | {"layers.00.a": (1,)}, {}, "has a layer '00', but not all from 0 on before it$"),
        (SOME | {"d2t": torch.tensor([1, 0, 0])}, {}, "has a d2t that gives two of its tokens the same token of the"),
    ],
    ids=range(19),
)
def test_heads_that_do_not_fit_the_model(
    shapes: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path, target: ModelConfig
) -> None:
    folder = write(tmp_path / "head", shapes, **values)
    with pytest.raises(CheckpointError, match=f"^{folder}/config.json: this draft head {message}"):
        resolve_head(target, str(folder), None)
