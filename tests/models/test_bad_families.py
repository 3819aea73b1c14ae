"""Checkpoints of every family whose config is absurd or whose tensors do not fit it: one line each, before weights are
read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.model import ModelConfig
from quire.models.registry import model_class
from quire.models.weights.loader import load_model
from tests.models.conftest import make_checkpoint
from tests.models.families import NESTED
from tests.models.latent import LATENT
from tests.models.mixtures import MIXTURES
from tests.models.other_layouts import LAYOUTS
from tests.models.test_drawn_shapes import BY_TYPE
from tests.models.variants import VARIANTS

OF_EACH = {architecture: variant for variant, (architecture, _) in reversed(VARIANTS.items())}
"""The first variant of each architecture."""
COUNTS = re.compile(
    r"(num_hidden_layers|n_layers?|num_attention_heads|n_heads?|num_key_value_heads|num_kv_heads"
    r"|num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_experts_per_tok|moe_topk)$"
)
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
OF_MIXTURES = [
    variant
    for variant in (*MIXTURES, *LATENT)
    if variant == OF_EACH[VARIANTS[variant][0]] and set(EXPERT_KEYS) & (VARIANTS[variant][1].keys() | {"ffn_config"})
]
ROUTER = re.compile(r"(gate|router|router\.layer|gate\.wg)\.weight$")
SIZES = re.compile(
    "(vocab_size|(?:hidden|intermediate|ffn|moe_intermediate)_(?:size|dim)|n_embd|d_model|n_inner|head_dim|(?:num_)?n?_?(?:hidden_)?layers?)$"
)
ABSURD = (10**12, -1, 0, 2.5, "4", [2], True)


def values_of(architecture: str) -> tuple[dict[str, Any], set[str]]:
    """The config.json of a small model, made from its config's class alone, and which keys that class has."""
    import transformers

    layout, fields = LAYOUTS.get(architecture), dict(VARIANTS[OF_EACH[architecture]][1])
    for key in ("seed", "table_scale"):
        fields.pop(key, None)
    kind = getattr(transformers, layout.oracle if layout else architecture)
    values: dict[str, Any] = kind.config_class(**fields).to_dict()
    known = fields.keys() & kind.config_class().to_dict().keys()
    return values | {"architectures": [architecture], "dtype": "float32"}, known


def describe(folder: Path) -> None:
    """Read the config and what the family makes of it."""
    config = ModelConfig.resolve(folder)
    kind: Any = model_class(config.architecture)
    kind.shape(config)


def refused(folder: Path, values: dict[str, Any]) -> str:
    """The error for a folder with this config.json, and no weights."""
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        describe(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("architecture", sorted(OF_EACH))
def test_absurd_counts_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    values, known = values_of(architecture)
    counts = [key for key in known if COUNTS.match(key) and not ("kv_lora_rank" in known and "key_value" in key)]
    assert len(counts) >= 2
    for key in counts:
        for absurd in ABSURD:
            refused(tmp_path, values | {key: absurd})


@pytest.mark.parametrize("architecture", sorted(OF_EACH))
def test_lists_for_other_layers_are_refused(architecture: str, tmp_path: Path) -> None:
    values, _ = values_of(architecture)
    lists = {"layer_types", "no_rope_layers", "mlp_layer_types"} & values.keys()
    if architecture in BY_TYPE:
        assert "layer_types" in lists
        assert "made_of_clay" in refused(
            tmp_path, values | {"layer_types": ["made_of_clay"] * len(values["layer_types"])}
        )
    for key in lists & {"layer_types"} if architecture in BY_TYPE else set():
        assert key in refused(tmp_path, values | {key: [*values[key], values[key][-1]]})


@pytest.mark.parametrize("architecture", sorted(OF_EACH))
def test_unknown_types_of_layers_are_refused(architecture: str, tmp_path: Path) -> None:
    """Whether or not the family has types of layers: a config that names one asks for something."""
    values, _ = values_of(architecture)
    key = next(key for key in ("num_hidden_layers", "n_layers", "n_layer") if key in values)
    assert "made_of_clay" in refused(tmp_path, values | {"layer_types": ["made_of_clay"] * values[key]})


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, dict[str, Any]], str]:
    """The error for a folder with this config.json, which comes before any weight is read."""
    monkeypatch.setattr("quire.models.weights.loader.reading", lambda *_: pytest.fail("a weight was read"))

    def run(folder: Path, values: dict[str, Any]) -> str:
        (folder / "config.json").write_text(json.dumps(values))
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            load_model(ModelConfig.resolve(folder))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return run


def widths(folder: Path) -> set[int]:
    """All sizes of the tensors in a checkpoint of one file."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {size for name in file.keys() for size in file.get_slice(name).get_shape()}  # noqa: SIM118


@pytest.mark.sampled(8)
@pytest.mark.parametrize("architecture", sorted(OF_EACH))
def test_numbers_that_contradict_the_tensors_are_refused(architecture: str, tmp_path: Path, load: Any) -> None:
    folder, _ = make_checkpoint(tmp_path, architecture, **VARIANTS[OF_EACH[architecture]][1])
    values = json.loads((folder / "config.json").read_text())
    known = values_of(architecture)[1]
    sizes = {key for key in known & values.keys() if SIZES.match(key) and type(values[key]) is int}
    if "moe_intermediate_size" in sizes and values.get("intermediate_size") not in widths(folder):
        sizes.discard("intermediate_size")  # every layer has experts
    assert len(sizes) >= 3
    for key in sizes:
        load(folder, values | {key: 2 * values[key]})


def mixture(variant: str, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any], str]:
    """The folder of a small model, its config, the part of that which has the number of experts, and its key."""
    architecture, fields = VARIANTS[variant]
    folder, _ = make_checkpoint(tmp_path, architecture, **fields)
    values = json.loads((folder / "config.json").read_text())
    section = values.get("ffn_config", values)
    known = section if section is not values else values_of(architecture)[1]
    return folder, values, section, next(key for key in EXPERT_KEYS if key in known)


@pytest.mark.parametrize("variant", OF_MIXTURES)
def test_experts_and_routers_that_do_not_fit_are_named(variant: str, tmp_path: Path, load: Any) -> None:
    """More experts in the config than in the files; then a router of another width alone; then an expert is missing."""
    folder, values, section, key = mixture(variant, tmp_path)
    num_experts = section[key]
    section[key] += 4
    assert re.search("gate|router|experts", load(folder, values))
    section[key] = num_experts
    tensors = load_file(folder / "model.safetensors")
    router = next(name for name in tensors if ROUTER.search(name) and tensors[name].shape[0] == num_experts)
    save_file(tensors | {router: tensors[router][1:].contiguous()}, folder / "model.safetensors")
    assert router in load(folder, values)
    for name in [name for name in tensors if re.search(r"experts\.1\.", name)]:
        del tensors[name]
    for name in [name for name in tensors if re.search(r"experts\.(mlp\.)?\w+$|_linear\.weight$", name)]:
        tensors[name] = tensors[name][len(tensors[name]) // num_experts :].contiguous()
    save_file(tensors, folder / "model.safetensors")
    assert "experts" in load(folder, values)


@pytest.mark.parametrize(("variant", "architecture"), NESTED.items())
def test_a_nested_config_without_its_text_part_is_refused(variant: str, architecture: str, tmp_path: Path) -> None:
    outer = {"architectures": [architecture], "vision_config": {"hidden_size": 32}, "dtype": "float32"}
    assert "no 'text_config'" in refused(tmp_path, outer)
    parts: list[Any] = [[], "gemma", 3, {}]
    for part in parts:
        assert "text_config" in refused(tmp_path, outer | {"text_config": part})
    text = {key: value for key, value in values_of(VARIANTS[variant][0])[0].items() if key != "architectures"}
    ModelConfig.resolve(tmp_path, hf_overrides=outer | {"text_config": text})
    for twice in ({"text_config": text}, text | {"text_config": text}, text | {"text_config": {}}):
        said = refused(tmp_path, outer | {"text_config": twice})
        assert "'text_config' holds another 'text_config'" in said
