"""What GGUF files call the architectures that Quire runs, and how each differs."""

from collections.abc import Collection
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.architectures import FUSED, SIGMOID, STACKED_MLP, Architecture, like
from quire.config.hf_config import HFConfig

_MAX_NAME = 80
_PAIRS = ("attn_q", "attn_k")
_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_QKV_BIAS, _O_BIAS, _UP_BIAS = ((f"blk.0.{name}.bias",) for name in ("attn_qkv", "attn_output", "ffn_up"))
_Q_BIAS = ("blk.0.attn_q.bias", *_QKV_BIAS)
_HEAD_NORM, _HEAD_BIAS = ("blk.0.attn_q_norm.weight",), ("output.bias",)
_BIASES = {"attention_bias": _Q_BIAS, "mlp_bias": _UP_BIAS}
_NORMALIZES = {"norm_topk_prob": "expert_weights_norm"}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_ROTATED = {"rope.scaling.finetuned": True}
"""Granite's models without a rotary embedding say so by this key."""
_GLM4_MOE = {
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_ERNIE_MOE = {
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
_DBRX = {
    "attn_config.kv_n_heads": "attention.head_count_kv",
    "attn_config.clip_qkv": "attention.clamp_kqv",
    "attn_config.rope_theta": "rope.freq_base",
    "ffn_config.ffn_hidden_size": "feed_forward_length",
    "ffn_config.moe_num_experts": "expert_count",
    "ffn_config.moe_top_k": "expert_used_count",
}
_MPT = {"attn_config.clip_qkv": "attention.clamp_kqv", "attn_config.alibi_bias_max": "attention.max_alibi_bias"}


def _llama(name: str = "LlamaForCausalLM", **changes: Any) -> Architecture:
    return like(Architecture(name, flags=_BIASES, pairs=_PAIRS), name, **changes)


def _gpt(name: str, **changes: Any) -> Architecture:
    """Queries, keys and values are in one tensor."""
    return like(Architecture(name, root="", modules=FUSED), name, **changes)


_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    modules=_SANDWICH,
    norm_offset=1.0,
    constants={"hidden_act": "gelu_pytorch_tanh"},
    values={key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")},
    flags={"attention_bias": _Q_BIAS},
    period=2,
    default_window=4096,
    wide_scale_layers=46,
)
_LLAMA = _llama(mixture="MixtralForCausalLM", windowed="MistralForCausalLM")
_COHERE = Architecture(
    "CohereForCausalLM",
    values={"logit_scale": "logit_scale"},
    flags={"attention_bias": _Q_BIAS, "use_qk_norm": _HEAD_NORM},
)
_GLM = Architecture("GlmForCausalLM", modules=STACKED_MLP, flags={"attention_bias": _Q_BIAS})
_FALCON = _gpt(
    "FalconForCausalLM",
    is_grouped=True,
    constants={"hidden_act": "gelu", "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    flags={"bias": _QKV_BIAS},
)
_FALCON_40B = like(
    _FALCON,
    _FALCON.name,
    modules=FUSED | {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"},
    constants={**_FALCON.constants, "num_ln_in_parallel_attn": 2},
)
_ERNIE = Architecture("Ernie4_5ForCausalLM", flags={"use_bias": _Q_BIAS})

ARCHITECTURES: dict[str, Architecture] = {
    "apertus": Architecture("ApertusForCausalLM", constants={"hidden_act": "xielu"}, flags=_BIASES),
    "arcee": _llama("ArceeForCausalLM", constants={"hidden_act": "relu2"}),
    "bloom": _gpt("BloomForCausalLM", is_grouped=True),
    "chatglm": like(_GLM, _GLM.name),
    "cohere2": like(_COHERE, "Cohere2ForCausalLM", period=4),
    "command-r": _COHERE,
    "dbrx": _gpt(
        "DbrxForCausalLM",
        mixture="DbrxForCausalLM",
        modules=FUSED | {"attn_output_norm": "post_attention_layernorm"},
        values=_DBRX,
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5-moe": like(
        _ERNIE,
        "Ernie4_5_MoeForCausalLM",
        mixture="Ernie4_5_MoeForCausalLM",
        unsqueezed=("exp_probs_b.bias",),
        values=_ERNIE_MOE,
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", period=4),
    "falcon": like(_FALCON, _FALCON.name, if_present=("blk.0.attn_norm_2.weight", _FALCON_40B)),
    "gemma": Architecture(
        "GemmaForCausalLM",
        norm_offset=1.0,
        constants={"hidden_act": "gelu_pytorch_tanh"},
        flags={"attention_bias": _Q_BIAS},
    ),
    "gemma2": _GEMMA2,
    "gemma3": like(
        _GEMMA2,
        "Gemma3ForCausalLM",
        period=6,
        default_window=None,
        rotates_windows_apart=True,
        window_rope_base=10_000.0,
        wide_scale_layers=62,
    ),
    "glm4": like(
        _GLM,
        "Glm4ForCausalLM",
        modules=STACKED_MLP
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        mixture="Glm4MoeForCausalLM",
        values=_GLM4_MOE | _NORMALIZES,
        flags={"attention_bias": _Q_BIAS, "use_qk_norm": _HEAD_NORM},
        gating=SIGMOID,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        mixture="GptOssForCausalLM",
        flags={"attention_bias": _Q_BIAS},
        period=2,
        rope={"truncate": False},
    ),
    "gpt2": _gpt("GPT2LMHeadModel", constants={"hidden_act": "gelu_new", "transposed_matrices": False}),
    "gptj": Architecture(
        "GPTJForCausalLM",
        root="",
        values={"rotary_dim": "rope.dimension_count"},
        constants={"hidden_act": "gelu_new"},
    ),
    "gptneox": _gpt(
        "GPTNeoXForCausalLM",
        is_grouped=True,
        values={"use_parallel_residual": "use_parallel_residual"},
        constants={"hidden_act": "gelu"},
        flags={"attention_bias": _QKV_BIAS},
    ),
    "granite": _llama("GraniteForCausalLM", values=_GRANITE, required=_ROTATED),
    "granitemoe": _llama("GraniteMoeForCausalLM", mixture="GraniteMoeForCausalLM", values=_GRANITE, required=_ROTATED),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", flags=_BIASES),
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "mpt": _gpt("MptForCausalLM", values=_MPT),
    "nemotron": Architecture(
        "NemotronForCausalLM", norm_offset=1.0, constants={"hidden_act": "relu2"}, flags=_BIASES
    ),
    "olmo": _llama("OlmoForCausalLM", values={"clip_qkv": "attention.clamp_kqv"}),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        windowed="Olmo3ForCausalLM",
        flags=_BIASES,
        period=4,
        rotates_windows_apart=True,
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", mixture="OlmoeForCausalLM", values=_NORMALIZES, flags=_BIASES
    ),
    "phi2": Architecture("PhiForCausalLM", constants={"hidden_act": "gelu_new"}),
    "phi3": Architecture("Phi3ForCausalLM", modules=FUSED | STACKED_MLP),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        mixture="PhimoeForCausalLM",
        values={
            "rope_parameters.short_mscale": "rope.scaling.attn_factor",
            "rope_parameters.long_mscale": "rope.scaling.attn_factor",
        },
        flags={"attention_bias": _Q_BIAS, "lm_head_bias": _HEAD_BIAS},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        mixture="Qwen2MoeForCausalLM",
        values={"shared_expert_intermediate_size": "expert_shared_feed_forward_length", **_NORMALIZES},
        flags={"qkv_bias": _Q_BIAS},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", flags=_BIASES),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        mixture="Qwen3MoeForCausalLM",
        values=_NORMALIZES,
        constants={"norm_topk_prob": True},
        flags=_BIASES,
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", flags=_BIASES | {"attention_out_bias": _O_BIAS}
    ),
    "smollm3": _llama("SmolLM3ForCausalLM"),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        values={"use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": _Q_BIAS},
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", constants={"hidden_act": "gelu_pytorch_tanh"}, flags={"use_bias": _Q_BIAS}
    ),
}  # fmt: skip
"""By `general.architecture`. Mistral's and Mixtral's models are `llama`, Minitron's `nemotron`, OLMo 3's `olmo2`."""


def architecture_of(metadata: HFConfig, tensors: Collection[str] = ()) -> Architecture:
    """The row of ARCHITECTURES that a header names, or the one for files with such `tensors`. Raises
    UnsupportedModelError if there is none, and CheckpointError if the header names none."""
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{metadata.source} has no 'general.architecture': it does not hold a model")
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{metadata.source}: GGUF files of the architecture {name[:_MAX_NAME]!r} are not supported (supported: "
            f"{', '.join(sorted(ARCHITECTURES))})"
        )
    found = ARCHITECTURES[name]
    if found.if_present is not None and found.if_present[0] in tensors:
        return found.if_present[1]
    return found
