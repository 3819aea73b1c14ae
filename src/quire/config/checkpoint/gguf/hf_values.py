"""From a GGUF header to the config.json and generation_config.json that the model would have.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and those that llama.cpp's converter writes.
"""

import struct
from collections.abc import Mapping
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.architectures import Architecture, architecture_of
from quire.config.checkpoint.gguf.files import GGUFModel
from quire.config.checkpoint.gguf.header import Array
from quire.config.checkpoint.tensors import MappedTensor
from quire.config.hf_config import HFConfig

QUANT_METHOD = "gguf"
"""The `quant_method` of a model with tensors in blocks."""

_ENDS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "</s>")
)
"""Control tokens that end an answer in every model that has them, whatever the header's ids say."""
_CONTROL = 3
_SOFTMAX = 1
"""of `expert_gating_func`"""
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""general.sampling.* -> the key of generation_config.json"""


def hf_values(model: GGUFModel) -> HFConfig:
    """The values of config.json. Raises UnsupportedModelError for an architecture, or a part of one, that Quire does
    not run, and CheckpointError if something is missing or malformed."""
    metadata, tensors = model.metadata, model.tensors
    architecture = architecture_of(metadata)
    keys = _Keys(metadata)
    embedding = _token_table(model)
    head_dim = keys.size("attention.key_length", embedding[1] // keys.size("attention.head_count"))
    mixture = _mixture(keys, architecture)
    _refuse_others(keys, head_dim)
    window, context_len = keys.get("attention.sliding_window"), keys.size("context_length")
    has_window = window not in (None, 0) and keys.size("attention.sliding_window") < context_len
    is_mistral = architecture.name == "LlamaForCausalLM" and has_window and not mixture
    values: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if is_mistral else architecture.name],
        "model_type": "mistral" if is_mistral else metadata.text("general.architecture"),
        "dtype": _dtype(tensors),
        "vocab_size": embedding[0],
        "hidden_size": embedding[1],
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": keys.size("attention.head_count_kv", keys.size("attention.head_count")),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_len,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(keys, model, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture.name != "Qwen2ForCausalLM" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    values |= mixture
    if has_window:
        values |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
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
    for theirs, ours in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{theirs}")
        if value is not None:
            values[ours] = value
    return HFConfig(values, metadata.source)


class _Keys:
    """Getters for the keys of the header's architecture, without its name."""

    def __init__(self, metadata: HFConfig) -> None:
        self.prefix = metadata.text("general.architecture")
        self.metadata = HFConfig({key: _shared(value) for key, value in metadata.items()}, metadata.source)

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}")

    def size(self, key: str, *default: int) -> int:
        return self.metadata.size(f"{self.prefix}.{key}", *default)

    def number(self, key: str, *default: float) -> float:
        return self.metadata.number(f"{self.prefix}.{key}", *default)

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        value = str(self.get(key))[:80]
        return UnsupportedModelError(f"{self.metadata.source}: {self.prefix}.{key} is {value}: {what}")


def _shared(value: Any) -> Any:
    """The one number of an array with a number for each layer, if they are all equal; other values as they are."""
    if isinstance(value, Array) and value.type != 8 and 0 < value.length <= 4096:
        numbers = value.numbers()
        return numbers[0] if len(set(numbers)) == 1 else numbers
    return value


def _token_table(model: GGUFModel) -> tuple[int, int]:
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.logical_shape) != 2:
        raise CheckpointError(f"{model.metadata.source} has no 'token_embd.weight' with two dimensions: incomplete")
    num_tokens, width = table.logical_shape
    return num_tokens, width


def _mixture(keys: _Keys, architecture: Architecture) -> dict[str, Any]:
    """The values of a mixture of experts; none for other models."""
    if not keys.get("expert_count"):
        return {}
    if architecture.mixture is None:
        raise keys.unsupported("expert_count", "mixtures of experts of this architecture are not supported")
    neutral = {"expert_shared_count": 0, "expert_gating_func": _SOFTMAX, "expert_weights_scale": 1.0}
    for key, value in (neutral | {"expert_group_count": 1}).items():
        if keys.get(key) not in (None, 0, value):
            raise keys.unsupported(key, "not supported")
    num_experts = keys.size("expert_count")
    return {
        "architectures": [architecture.mixture],
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length", keys.size("feed_forward_length")),
        "norm_topk_prob": architecture.mixture == "Qwen3MoeForCausalLM",
    }


def _refuse_others(keys: _Keys, head_dim: int) -> None:
    """Raise UnsupportedModelError for what would otherwise be computed as if it were not there."""
    if keys.get("attention.causal") is False:
        raise keys.unsupported("attention.causal", "encoders are not supported")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length", f"must equal the length of keys, {head_dim}")
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise keys.unsupported("rope.dimension_count", f"must equal the head's size, {head_dim}")
    for key in ("attention.scale", "logit_scale", "residual_scale", "embedding_scale"):
        neutral = head_dim**-0.5 if key == "attention.scale" else 1.0
        if keys.get(key) and abs(keys.number(key) / neutral - 1) > 1e-5:
            raise keys.unsupported(key, "this scale is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"):
        if keys.get(key):
            raise keys.unsupported(key, "not supported")


def _rope(keys: _Keys, model: GGUFModel, head_dim: int) -> dict[str, Any]:
    """The rotary embedding's parameters."""
    context_len = keys.size("context_length")
    scaling = keys.get("rope.scaling.type") or "linear"
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_type": "default"}
    original = keys.size("rope.scaling.original_context_length", context_len)
    if tables := [name for name in model.tensors if name.startswith("rope_")]:
        if scaling not in ("none", "linear", "longrope") or (scaling != "longrope" and factor != 1.0):
            raise keys.unsupported("rope.scaling.type", f"together with {', '.join(tables)} this is not supported")
        return {**rope, **_divided(model, head_dim), "original_max_position_embeddings": original,
                "attention_factor": keys.number("rope.scaling.attn_factor", 1.0)}  # fmt: skip
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return rope
    if scaling == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if scaling != "yarn":
        raise keys.unsupported("rope.scaling.type", "supported are none, linear, yarn, and longrope with its tables")
    rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for theirs, ours in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        if keys.get(f"rope.scaling.yarn_{theirs}") is not None:
            rope[ours] = keys.number(f"rope.scaling.yarn_{theirs}")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.get(f"rope.scaling.{key}") not in (None, 1.0):
            raise keys.unsupported(f"rope.scaling.{key}", "only 1 is supported")
    return rope


def _divided(model: GGUFModel, head_dim: int) -> dict[str, Any]:
    """Frequencies divided by the numbers of a table: one table for every length (Llama 3.1), or a long and a short one.

    `longrope` divides just so; with its two lists equal, the length of the sequence makes no difference.
    """
    tables = {name: model.tensors[name] for name in model.tensors if name.startswith("rope_")}
    single = tables.get("rope_freqs.weight")
    long, short = (tables.get(f"rope_factors_{kind}.weight", single) for kind in ("long", "short"))
    if long is None or short is None:
        raise CheckpointError(f"{model.metadata.source} has {', '.join(tables)} alone: the other table is missing")
    return {
        "rope_type": "longrope",
        "long_factor": _floats(long, head_dim // 2),
        "short_factor": _floats(short, head_dim // 2),
    }


def _floats(tensor: MappedTensor, length: int) -> list[float]:
    if tensor.dtype != "float32" or tensor.shape != (length,):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name!r} must be float32 [{length}], not {tensor.dtype} {list(tensor.shape)}"
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{length}f", file.read(tensor.num_bytes)))


def _dtype(tensors: Mapping[str, MappedTensor]) -> str:
    """The dtype of the matrices; bfloat16 for a model with blocks, whose first dtype no header states."""
    found = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if found == {"float32"} else "float16" if found == {"float16"} else "bfloat16"
