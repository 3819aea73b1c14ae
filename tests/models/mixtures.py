"""A small model of each architecture with experts, and of the variants of routers and arrangements."""

from typing import Any

from tests.models.families import SMALL

EXPERTS = SMALL | {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 16}
FFN = {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2}
DBRX = {
    "vocab_size": 96,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 128,
    "initializer_range": 0.5,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 500.0},
    "ffn_config": FFN,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.1, 1.2, 1.3],  # transformers takes the short factors for every length
    "original_max_position_embeddings": 32,
}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "mixtral-window-all": ("MixtralForCausalLM", EXPERTS | {"sliding_window": 7, "num_experts_per_tok": 6}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2-moe-some-layers": (
        "Qwen2MoeForCausalLM",
        EXPERTS
        | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("OlmoeForCausalLM", EXPERTS | {"num_key_value_heads": 4}),
    "olmoe-normalized": ("OlmoeForCausalLM", EXPERTS | {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "olmoe-clipped": ("OlmoeForCausalLM", EXPERTS | {"clip_qkv": 0.6, "num_key_value_heads": 2}),
    "flex-olmo": ("FlexOlmoForCausalLM", EXPERTS | {"pad_token_id": None, "eos_token_id": 2}),
    "flex-olmo-normalized": (
        "FlexOlmoForCausalLM",
        EXPERTS | {"pad_token_id": None, "eos_token_id": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "solar-open": ("SolarOpenForCausalLM", SMALL | GLM_EXPERTS | {"head_dim": 16}),
    "solar-open-groups": (
        "SolarOpenForCausalLM",
        SMALL
        | GLM_EXPERTS
        | {"head_dim": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "attention_bias": True},
    ),
    "dbrx": ("DbrxForCausalLM", DBRX),
    "dbrx-not-normalized": (
        "DbrxForCausalLM",
        DBRX
        | {
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 50.0, "rope_theta": 500.0},
            "ffn_config": FFN | {"moe_normalize_expert_weights": None},
        },
    ),
    "gpt-oss": ("GptOssForCausalLM", EXPERTS | {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 5}),
    "gpt-oss-yarn-full": (
        "GptOssForCausalLM",
        EXPERTS
        | {"head_dim": 8, "layer_types": ["full_attention"] * 2, "swiglu_limit": 0.5, "num_experts_per_tok": 6}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "phimoe": ("PhimoeForCausalLM", EXPERTS | {"sliding_window": 9}),
    "phimoe-biases-longrope": (
        "PhimoeForCausalLM",
        EXPERTS
        | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3, "sliding_window": None}
        | {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.2}},
    ),
    "glm4-moe": ("Glm4MoeForCausalLM", SMALL | GLM_EXPERTS | {"head_dim": 16, "num_mtp_layers": 0}),
    "glm4-moe-groups": (
        "Glm4MoeForCausalLM",
        SMALL
        | GLM_EXPERTS
        | {"head_dim": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
        | {"use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0, "first_k_dense_replace": 2},
    ),
    "dots1": ("Dots1ForCausalLM", SMALL | GLM_EXPERTS | {"n_shared_experts": 1, "norm_topk_prob": True}),
    "dots1-windows": (
        "Dots1ForCausalLM",
        SMALL
        | GLM_EXPERTS
        | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "attention_bias": True}
        | {"first_k_dense_replace": 1, "sliding_window": 7, "max_window_layers": 1},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        SMALL | {"num_experts": 5, "moe_topk": 2, "head_dim": 16, "attention_bias": True},
    ),
    "minimax-m2": ("MiniMaxM2ForCausalLM", EXPERTS | {"head_dim": 8}),
    "minimax-m2-partial": (
        "MiniMaxM2ForCausalLM",
        EXPERTS | {"head_dim": 16, "rotary_dim": 8, "num_experts_per_tok": 3},
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        EXPERTS | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4},
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        EXPERTS | {"residual_multiplier": 0.4, "shared_intermediate_size": 40, "attention_multiplier": 0.2},
    ),
    "granite-moe-not-shared": ("GraniteMoeSharedForCausalLM", EXPERTS | {"shared_intermediate_size": 0}),
    "ernie4-5-moe": ("Ernie4_5_MoeForCausalLM", SMALL | ERNIE_EXPERTS | {"moe_num_shared_experts": 1}),
    "ernie4-5-moe-some-layers": (
        "Ernie4_5_MoeForCausalLM",
        SMALL
        | ERNIE_EXPERTS
        | {"num_hidden_layers": 5, "moe_layer_start_index": 0, "moe_layer_end_index": 3, "moe_layer_interval": 2}
        | {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ),
}
