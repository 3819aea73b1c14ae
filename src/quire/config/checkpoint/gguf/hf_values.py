"""From a GGUF header to the config.json and generation_config.json that the model would have.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and those that llama.cpp's converter writes.
"""

from collections.abc import Mapping
from typing import Any

from quire.common.errors import CheckpointError
from quire.config.checkpoint.gguf.architectures import Architecture
from quire.config.checkpoint.gguf.files import GGUFModel
from quire.config.checkpoint.gguf.header import Array
from quire.config.checkpoint.gguf.keys import Keys
from quire.config.checkpoint.gguf.rope import FULL, SLIDING, rope_parameters
from quire.config.checkpoint.gguf.table import architecture_of
from quire.config.checkpoint.tensors import MappedTensor
from quire.config.hf_config import HFConfig

QUANT_METHOD = "gguf"
"""The `quant_method` of a model with tensors in blocks."""

_ENDS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "</s>")
)
"""Control tokens that end an answer in every model that has them, whatever the header's ids say."""
_CONTROL = 3
_NOT_COMPUTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
)
"""Keys that only the architectures whose row names them may have, unless the value is 0."""
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""general.sampling.* -> the key of generation_config.json"""


def hf_values(model: GGUFModel) -> HFConfig:
    """The values of config.json. Raises UnsupportedModelError for an architecture, or a part of one, that Quire does
    not run, and CheckpointError if something is missing or malformed."""
    metadata, tensors = model.metadata, model.tensors
    architecture, keys = architecture_of(metadata, tensors), Keys(metadata)
    num_tokens, hidden_size = _token_table(model)
    num_heads, num_kv_heads = keys.heads()
    if num_heads > hidden_size:
        raise CheckpointError(f"{metadata.source}: {num_heads} attention heads are more than the width {hidden_size}")
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    _refuse_others(keys, architecture, head_dim)
    values: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": metadata.text("general.architecture"),
        "dtype": _dtype(tensors),
        "vocab_size": num_tokens,
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.num_layers(),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.size("context_length"),
        "rope_parameters": rope_parameters(keys, model, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        **_eps(keys),
        **_mixture(keys, architecture),
        **architecture.constants,
        **{key: any(name in tensors for name in names) for key, names in architecture.flags.items()},
    }
    values |= _windows(keys, architecture, values)
    if architecture.wide_scale_layers is not None:
        is_wide = values["num_hidden_layers"] == architecture.wide_scale_layers
        values["query_pre_attn_scalar"] = hidden_size // num_heads if is_wide else head_dim
    for ours, theirs in architecture.values.items():
        if keys.get(theirs) is not None:
            _put(values, ours, keys.get(theirs))
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        values[f"{role}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if any(tensor.block_type for tensor in tensors.values()):
        values["quantization_config"] = {"quant_method": QUANT_METHOD}
    return HFConfig(values, metadata.source)


def generation_values(model: GGUFModel) -> HFConfig:
    """The values of generation_config.json: the tokens that end an answer, and recommended sampling parameters."""
    metadata = model.metadata
    ends: set[int] = set()
    for role in ("eos", "eot", "eom"):
        ends |= metadata.token_ids(f"tokenizer.ggml.{role}_token_id") or frozenset()
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, Array) and isinstance(types, Array):
        named = zip(tokens.strings(), types.numbers(), strict=False)
        ends |= {i for i, (token, kind) in enumerate(named) if kind == _CONTROL and token in _ENDS}
    values: dict[str, Any] = {"eos_token_id": sorted(ends)} if ends else {}
    recommended = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    values |= {name: value for name, value in recommended.items() if value is not None}
    return HFConfig(values, metadata.source)


def _token_table(model: GGUFModel) -> tuple[int, int]:
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.logical_shape) != 2:
        raise CheckpointError(f"{model.metadata.source} has no 'token_embd.weight' with two dimensions: incomplete")
    num_tokens, width = table.logical_shape
    return num_tokens, width


def _eps(keys: Keys) -> dict[str, float]:
    """What norms add to the variance: root mean square norms, and those that subtract the mean."""
    names = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon"}
    found = {ours: keys.number(theirs) for ours, theirs in names.items() if keys.get(theirs) is not None}
    return found or {"rms_norm_eps": keys.number(names["rms_norm_eps"])}


def _mixture(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """The values of a mixture of experts; none for other models."""
    if not keys.get("expert_count"):
        return {}
    if architecture.mixture is None:
        raise keys.unsupported("expert_count", "mixtures of experts of this architecture are not supported")
    read = architecture.values.values()
    neutral = {"expert_shared_count": 0, "expert_weights_scale": 1.0, "expert_group_count": 1}
    if "expert_shared_count" not in read:
        neutral["expert_shared_feed_forward_length"] = 0
    for key, value in (neutral | {"expert_gating_func": architecture.gating}).items():
        if key not in read and keys.get(key) not in (None, 0, value):
            raise keys.unsupported(key, "not supported")
    num_experts, top_k = keys.size("expert_count"), keys.size("expert_used_count")
    return {
        "architectures": [architecture.mixture],
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), top_k),
        "moe_intermediate_size": keys.size("expert_feed_forward_length", keys.size("feed_forward_length")),
        "norm_topk_prob": False,
    }


def _windows(keys: Keys, architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window, which layers have it, and the class of models that have one."""
    window = keys.count("attention.sliding_window") or architecture.default_window
    found: dict[str, Any] = {}
    if architecture.period is not None:
        types = _layer_types(keys, architecture.period, values["num_hidden_layers"], has_window=window is not None)
        found = {"sliding_window": window, "layer_types": types}
    elif window is not None and window < values["max_position_embeddings"]:
        if keys.get("attention.sliding_window_pattern") is not None:
            raise keys.unsupported("attention.sliding_window_pattern", "not supported for this architecture")
        found = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    if architecture.windowed and found.get("sliding_window") and values["architectures"] == [architecture.name]:
        model_type = architecture.windowed.removesuffix("ForCausalLM").lower()
        found |= {"architectures": [architecture.windowed], "model_type": model_type}
    return found


def _layer_types(keys: Keys, period: int, num_layers: int, *, has_window: bool) -> list[str]:
    stated = keys.get("attention.sliding_window_pattern")
    period = stated if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0 else period
    slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if isinstance(stated, bool):
        slides = [stated] * num_layers
    elif isinstance(stated, list):
        if len(stated) != keys.size("block_count"):
            raise CheckpointError(
                f"{keys.metadata.source}: {keys.prefix}.attention.sliding_window_pattern has {len(stated)} values for "
                f"{keys.size('block_count')} layers"
            )
        slides = [bool(each) for each in stated[:num_layers]]
    return [SLIDING if has_window and each else FULL for each in slides]


def _refuse_others(keys: Keys, architecture: Architecture, head_dim: int) -> None:
    """Raise UnsupportedModelError for what would otherwise be computed as if it were not there."""
    if keys.get("attention.causal") is False:
        raise keys.unsupported("attention.causal", "encoders are not supported")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length", f"must equal the length of keys, {head_dim}")
    read = architecture.values.values()
    for key in ("attention.scale", "logit_scale", "residual_scale", "embedding_scale"):
        neutral = head_dim**-0.5 if key == "attention.scale" else 1.0
        if key not in read and keys.get(key) and abs(keys.number(key) / neutral - 1) > 1e-5:
            raise keys.unsupported(key, "this scale is not supported")
    for key, value in architecture.required.items():
        if keys.get(key) not in (None, value):
            raise keys.unsupported(key, f"only {value} is supported")
    for key in _NOT_COMPUTED:
        if key not in read and keys.get(key):
            raise keys.unsupported(key, "not supported")


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a key, or of one in a section."""
    section, _, key = name.rpartition(".")
    (values.setdefault(section, {}) if section else values)[key] = value


def _dtype(tensors: Mapping[str, MappedTensor]) -> str:
    """The dtype of the matrices; bfloat16 for a model with blocks, whose first dtype no header states."""
    found = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if found == {"float32"} else "float16" if found == {"float16"} else "bfloat16"
