"""Decoders of sizes that nobody chose: odd heads, widths and vocabularies, heads of another width than the hidden
states give, other windows and types of layers. Logits are compared with transformers' in float64, since some random
shapes amplify rounding so much that its float32 is itself about as far away as the tolerance allows."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model
from tests.effort import examples
from tests.models.conftest import PagedRun, make_checkpoint
from tests.models.families import FULL, SLIDING
from tests.models.other_layouts import LAYOUTS
from tests.models.test_against_transformers import TOLERANCE, oracle_logits
from tests.models.variants import VARIANTS

HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
MLP_WIDTHS = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
BY_TYPE = {
    "Cohere2ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "MinistralForCausalLM",
    "Olmo3ForCausalLM",
}
"""Architectures in which each layer may be of either type."""
MANY_KEYS = {"BaichuanForCausalLM"}
"""Architectures in which no two queries share a key."""
FIXED = {
    "alibi",
    "attn_config",
    "ffn_config",
    "kv_lora_rank",
    "multi_query",
    "new_decoder_architecture",
    "word_embed_proj_dim",
}
"""Variants with one of these keys, or with factors for each pair of a head, keep their heads."""
KEPT_HEADS = {"HeliumForCausalLM", "MiniCPMForCausalLM"}
"""Architectures whose oracle fits one width of heads alone: by its scale, or its square output projection."""
PROMPT = [5, 60, 3, 3, 17, 40, 8, 71, 2, 33, 12, 7, 9, 1, 64, 22, 50]


def key_of(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in fields), None)


def must_divide(architecture: str) -> bool:
    """Whether transformers wants the hidden size to be a multiple of the number of heads, whatever their width."""
    layout = LAYOUTS.get(architecture)
    kind = getattr(transformers, layout.oracle if layout else architecture)
    return hasattr(kind.config_class, "validate_architecture")


@st.composite
def heads(draw: st.DrawFn, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers of heads, and widths of heads and hidden states that go with them."""
    hidden, count, shared = key_of(fields, HIDDEN), key_of(fields, HEADS), key_of(fields, KV_HEADS)
    assert hidden
    assert count
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 5]))
    ratio = draw(st.sampled_from([1, 3, 5])) if shared and architecture not in MANY_KEYS else 1
    head_dim = draw(st.sampled_from([8, 16, 24]))
    changes = {count: num_kv_heads * ratio, hidden: num_kv_heads * ratio * head_dim}
    if shared:
        changes[shared] = num_kv_heads
    if "head_dim" in fields:
        width = draw(st.sampled_from([20, 28, 36, 44, 76]))
        step = changes[count] if must_divide(architecture) else 1
        changes |= {"head_dim": head_dim, hidden: -(-width // step) * step}
    if "initializer_range" in fields and changes[hidden] > fields[hidden]:  # else wide layers would amplify rounding
        changes["initializer_range"] = fields["initializer_range"] * (fields[hidden] / changes[hidden]) ** 0.5
    return changes


@st.composite
def layers(draw: st.DrawFn, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The number of layers, their types, and how far those with a window see."""
    changes: dict[str, Any] = {}
    if fields.get("sliding_window"):
        changes["sliding_window"] = draw(st.integers(1, 20))
    count = key_of(fields, LAYERS)
    if architecture in BY_TYPE and count:
        types = draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=5))
        changes |= {count: len(types), "layer_types": types, "sliding_window": draw(st.integers(1, 20))}
    return changes


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An architecture, and the fields of one of its variants with other sizes."""
    architecture, fields = VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))]
    changes: dict[str, Any] = {"vocab_size": draw(st.sampled_from([73, 97, 101, 130]))}
    changes |= {key: draw(st.sampled_from([17, 33, 40, 51])) for key in MLP_WIDTHS if fields.get(key)}
    is_kept = architecture in KEPT_HEADS or FIXED & fields.keys()
    if not (is_kept or "short_factor" in fields.get("rope_parameters", {})):
        changes |= draw(heads(architecture, fields))
    changes |= draw(layers(architecture, fields))
    return architecture, fields | changes


def assert_as_exact_as(oracle: Any, tokens: list[int], padded_len: int, ours: torch.Tensor) -> None:
    """Assert that logits are as near to those of `oracle` in float64 as its own in float32 are, within a factor."""
    exact = oracle_logits(oracle.double(), tokens, padded_len)
    error = (ours - exact).abs().max()
    if error > TOLERANCE * exact.abs().max():
        rounded = oracle_logits(oracle.float(), tokens, padded_len)
        assert error <= 4 * (rounded - exact).abs().max()


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes())
def test_shapes_that_nobody_chose_equal_transformers(shape: tuple[str, dict[str, Any]]) -> None:
    architecture, fields = shape
    with tempfile.TemporaryDirectory() as folder:
        path, oracle = make_checkpoint(Path(folder), architecture, **fields)
        oracle.set_experts_implementation("eager")  # the other one needs widths of whole vectors
        config = ModelConfig.resolve(path)
        run = PagedRun(load_model(config), config, [PROMPT, PROMPT[:6]])
        parts = [run.step(counts) for counts in ([7, 3], [5, 0], [5, 3])]
    for tokens, *parts_of_sequence in zip(run.sequences, *parts, strict=True):
        assert_as_exact_as(oracle, tokens, config.max_model_len, torch.cat(parts_of_sequence))
