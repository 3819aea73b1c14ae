"""A small model of each architecture with multi-head latent attention, and of its variants."""

from typing import Any

from tests.models.families import SMALL
from tests.models.mixtures import GLM_EXPERTS, YARN

MLA = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
MLA |= {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
MLA |= {"num_key_value_heads": 4, "num_mtp_layers": 0}
DEEPSEEK = MLA | GLM_EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 2}
MSCALES = YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}

LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        | {"attention_bias": True, "rope_parameters": MSCALES},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "v_head_dim": 36,
            "hidden_size": 40,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "rope_parameters": MSCALES},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "kv_lora_rank": 64},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        MLA | GLM_EXPERTS | {"n_shared_experts": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "youtu": ("YoutuForCausalLM", {key: value for key, value in MLA.items() if key != "num_mtp_layers"}),
    "minicpm3": ("MiniCPM3ForCausalLM", MLA | {"scale_emb": 3, "dim_model_base": 16, "table_scale": 0.3}),
}
