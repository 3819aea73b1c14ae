"""A small model of each architecture that Quire runs, and of each variant that changes the arithmetic."""

from typing import Any

from tests.models.families import FAMILIES, SMALL
from tests.models.latent import LATENT
from tests.models.mixtures import MIXTURES
from tests.models.other_layouts import OTHERS

LLAMA = SMALL
OPT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "init_std": 0.5,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 2.5, 4.0],
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **FAMILIES,
    **MIXTURES,
    **LATENT,
    **OTHERS,
    "opt": ("OPTForCausalLM", OPT),
    "opt-post-norm": ("OPTForCausalLM", OPT | {"do_layer_norm_before": False}),
    "opt-350m-like": ("OPTForCausalLM", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-pre-norm-projected": ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 48}),
    "opt-no-final-norm": ("OPTForCausalLM", OPT | {"_remove_final_layer_norm": True}),
    "opt-untied-plain": (
        "OPTForCausalLM",
        OPT
        | {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "llama-gqa": ("LlamaForCausalLM", LLAMA),
    "llama-mha-tied": ("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 1}),
    "llama-biases": ("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaForCausalLM", LLAMA | {"head_dim": 16}),
    "llama-gelu": ("LlamaForCausalLM", LLAMA | {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("LlamaForCausalLM", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("LlamaForCausalLM", LLAMA | {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "llama-yarn-attention-factor": ("LlamaForCausalLM", LLAMA | {"rope_parameters": YARN | {"attention_factor": 1.4}}),
    "llama-llama3": ("LlamaForCausalLM", LLAMA | {"rope_parameters": LLAMA3}),
    "llama-longrope": ("LlamaForCausalLM", LLAMA | {"rope_parameters": LONGROPE}),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 7}),
    "mistral-full": ("MistralForCausalLM", LLAMA | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "qwen2-window-by-layer": (
        "Qwen2ForCausalLM",
        LLAMA | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "Qwen2ForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 16}),
    "qwen3-biases-tied": (
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
"""architecture and fields of its config"""
