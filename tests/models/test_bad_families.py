"""Checkpoints of every family whose config is absurd or whose tensors do not fit it: one line each, before weights are
read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.model import ModelConfig
from quire.models.registry import model_class
from quire.models.weights.loader import load_model
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


@pytest.mark.parametrize("variant", [name for name in MIXTURES if name == OF_EACH[MIXTURES[name][0]]])
def test_experts_and_routers_that_do_not_fit_are_named(variant: str, save_checkpoint: Callable[..., Any]) -> None:
    """One expert more in the config than in the files: the router is of another width, and an expert is missing."""
    architecture, fields = MIXTURES[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    section = values.get("ffn_config", values)
    known = section if section is not values else values_of(architecture)[1]
    key = next(key for key in EXPERT_KEYS if key in known)
    section[key] += 4
    path.write_text(json.dumps(values))
    config = ModelConfig.resolve(folder)
    with pytest.raises(CheckpointError, match=r"gate|router|experts") as caught:
        load_model(config)
    assert "\n" not in str(caught.value)
