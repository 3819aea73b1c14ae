"""Checkpoints of draft heads that are incomplete, or whose config.json contradicts their tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.common.errors import CheckpointError
from quire.config.checkpoint.draft_heads import resolve_head
from quire.config.model import ModelConfig

from .test_draft_heads import CONFIG, FUSED, FUSED3, MTP_FC, VOCAB, WIDTH, target_in, write


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
        ({"mtp.fc.weight": MTP_FC}, {"vocab_size": 13}, "'vocab_size' is 13, but .* for have 12: take"),
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
