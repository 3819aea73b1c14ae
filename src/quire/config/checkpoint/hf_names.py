"""The values of a config.json under the names that Quire reads, whatever its family calls them or leaves out."""

import re
from collections.abc import Mapping
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.common.log import logger
from quire.config.hf_config import HFConfig

LAYER_TYPES = "full_attention", "sliding_attention"
"""The types of layers that Quire has."""
_NAMES = {
    "hidden_size": ("n_embd", "d_model", "n_embed", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx", "model_max_length"),
    "hidden_act": ("activation_function", "hidden_activation", "activation"),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct", "rotary_emb_fraction"),
    "rope_theta": ("rotary_emb_base",),
}
"""The name that Quire reads -> what families call it. The first that has a value counts."""

_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "BloomForCausalLM": {"max_position_embeddings": 2048},
    "FalconForCausalLM": {"max_position_embeddings": 2048},
    "RWForCausalLM": {"max_position_embeddings": 2048},
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GPTNeoXForCausalLM": {"partial_rotary_factor": 0.25},
    "StableLmForCausalLM": {"partial_rotary_factor": 0.25},
    "GlmForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
    "NemotronForCausalLM": {"partial_rotary_factor": 0.5},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
}
"""Architecture -> values that its published configs leave out. Of BLOOM and Falcon, the length trained on."""
_AFTER_PADDING = re.compile("^(Roberta|XLMRoberta|Camembert|MPNet|BgeM3Embedding)(For|Model)")
"""Architectures whose tables of positions begin with rows that no token has, up to that of the padding token."""
_TEXT_PART = "text_config"
_NESTED = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
"""Architectures with a text model that Quire runs, and other parts that it leaves out."""


def standard_names(hf: HFConfig) -> HFConfig:
    """The same values, and those that have another name under the one that Quire reads too; of a model for text and
    images, the values of its text part. Raises CheckpointError for a config that lacks that part or has it twice, or
    whose types of layers are no list, and UnsupportedModelError for one that names another type of layers than Quire
    has, whether its family has types or not.
    """
    architecture = _architecture(hf)
    stated = _text_values(hf) if architecture in _NESTED else dict(hf)
    values = {**_DEFAULTS.get(architecture, {}), **stated}
    for name, theirs in _NAMES.items():
        stated_as = next((each for each in (name, *theirs) if stated.get(each) is not None), None)
        if stated_as is not None:
            values[name] = stated[stated_as]
    _check_layer_types(values.get("layer_types"), hf.source)
    if architecture.startswith("MPNet"):
        values["pad_token_id"] = 1  # transformers counts positions from it, whatever the config says
    if _AFTER_PADDING.match(architecture):
        known = HFConfig(values, hf.source)
        values["max_position_embeddings"] = known.size("max_position_embeddings") - _unused(known)
    return HFConfig(values, hf.source)


def _check_layer_types(types: Any, source: str) -> None:
    if types is None:
        return
    if not isinstance(types, list):
        raise CheckpointError(f"{source}: 'layer_types' is {str(types)[:80]!r}, but must be a list of types of layers")
    if unknown := sorted({str(name)[:80] for name in types if name not in LAYER_TYPES}):
        raise UnsupportedModelError(f"{source}: layer_types {unknown[:3]}: supported are " + ", ".join(LAYER_TYPES))


def stated_values(hf: HFConfig) -> dict[str, Any]:
    """The values of a config that `standard_names` made, so that it makes the same of them again."""
    if not _AFTER_PADDING.match(_architecture(hf)):
        return dict(hf)
    return {**hf, "max_position_embeddings": hf.size("max_position_embeddings") + _unused(hf)}


def _architecture(hf: HFConfig) -> str:
    named = hf.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _unused(hf: HFConfig) -> int:
    """The number of rows of the table of positions that no token has."""
    return hf.count("pad_token_id", 1) + 1


def _text_values(hf: HFConfig) -> dict[str, Any]:
    """The values of the text part, and those outside of it, which count where both have one."""
    text = hf.section(_TEXT_PART)
    if not text and "hidden_size" not in hf:
        raise CheckpointError(f"{hf.source} has no {_TEXT_PART!r}: this checkpoint is incomplete")
    if not text:
        return dict(hf)  # saved by Quire
    if text.get(_TEXT_PART) is not None:
        raise CheckpointError(
            f"{hf.source}: {_TEXT_PART!r} holds another {_TEXT_PART!r}, but must hold the values of the text model"
        )
    logger.info("%s describes a model that reads images too: Quire loads its text model alone", hf.source)
    outer = {name: value for name, value in hf.items() if name != _TEXT_PART and value is not None}
    return {**text, **outer}
