"""A small model of each architecture, and of each of its variants that changes the arithmetic."""

from typing import Any

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.5}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
FALCON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "initializer_range": 0.5,
}
FULL, SLIDING = "full_attention", "sliding_attention"
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}

PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
LLAMA4 = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA4 |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 500.0, "factor": 1.0}

GEMMA = SMALL | {"head_dim": 16, "initializer_range": 0.5, "table_scale": 0.3}
MPT = {
    "vocab_size": 96,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 128,
    "initializer_range": 0.5,
    "seed": 3,
}
MPT |= {"table_scale": 0.3}
BLOOM = {
    "vocab_size": 96,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "seq_length": 128,
    "initializer_range": 0.7,
    "seed": 4,
}
GPTJ = GPT2 | {"rotary_dim": 4, "initializer_range": 0.3}
INTERLEAVED = SMALL | {"head_dim": 16}
APERTUS = SMALL | {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
APERTUS |= {"initializer_range": 0.1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", APERTUS),
    "apertus-biases-silu": (
        "ApertusForCausalLM",
        APERTUS | {"attention_bias": True, "hidden_act": "silu", "initializer_range": 0.3},
    ),
    "arcee": ("ArceeForCausalLM", SMALL | {"head_dim": 8}),
    "arcee-biases": ("ArceeForCausalLM", SMALL | {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "bloom": ("BloomForCausalLM", BLOOM),
    "bloom-residual-untied": (
        "BloomForCausalLM",
        BLOOM
        | {
            "apply_residual_connection_post_layernorm": True,
            "tie_word_embeddings": False,
            "n_head": 2,
            "initializer_range": 0.1,
            "table_scale": 0.01,
            "seed": 1,
        },
    ),
    "bloom-odd-heads": (
        "BloomForCausalLM",
        BLOOM | {"n_head": 6, "hidden_size": 48, "initializer_range": 0.3, "seed": 2},
    ),
    "cohere": ("CohereForCausalLM", SMALL | {"logit_scale": 0.25}),
    "cohere-biases-untied": (
        "CohereForCausalLM",
        SMALL | {"logit_scale": 1.5, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere-norms": ("CohereForCausalLM", SMALL | {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2ForCausalLM",
        SMALL | {"logit_scale": 0.25, "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "cwm": (
        "CwmForCausalLM",
        SMALL | PLAIN_ROPE | {"num_hidden_layers": 5, "sliding_window": 6, "head_dim": 16, "eos_token_id": 2},
    ),
    "cwm-types": (
        "CwmForCausalLM",
        SMALL | {"sliding_window": 6, "head_dim": 8, "mlp_bias": True, "layer_types": [SLIDING, FULL]}
        | {"eos_token_id": 2}
        | PLAIN_ROPE,
    ),
    "ernie4-5": ("Ernie4_5ForCausalLM", INTERLEAVED),
    "ernie4-5-biases": ("Ernie4_5ForCausalLM", INTERLEAVED | {"use_bias": True, "tie_word_embeddings": False}),
    "exaone4": (
        "Exaone4ForCausalLM",
        SMALL | {"num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "exaone4-full": ("Exaone4ForCausalLM", SMALL | {"sliding_window": None, "layer_types": [FULL] * 2}),
    "falcon-7b": ("FalconForCausalLM", FALCON),
    "falcon-40b": (
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": False},
    ),
    "falcon-rw": (
        "FalconForCausalLM",
        FALCON
        | {
            "alibi": True,
            "parallel_attn": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "bias": True,
            "initializer_range": 0.2,
            "seed": 2,
        },
    ),
    "falcon-one-norm": (
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-serial": (
        "FalconForCausalLM",
        FALCON | {"parallel_attn": False, "multi_query": False, "num_kv_heads": 4, "ffn_hidden_size": 48},
    ),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma-biases-untied": (
        "GemmaForCausalLM",
        GEMMA | {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | {"sliding_window": 6, "query_pre_attn_scalar": 20}),
    "gemma2-without-caps": (
        "Gemma2ForCausalLM",
        GEMMA | {"sliding_window": 6, "final_logit_softcapping": None, "attn_logit_softcapping": None},
    ),
    "vaultgemma": ("VaultGemmaForCausalLM", GEMMA | {"sliding_window": 6, "attn_logit_softcapping": 5.0}),
    "jais2": ("Jais2ForCausalLM", SMALL | {"head_dim": 8}),
    "jais2-plain-silu": (
        "Jais2ForCausalLM",
        SMALL | {"head_dim": 16, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    ),
    "nanochat": ("NanoChatForCausalLM", SMALL | PLAIN_ROPE),
    "nanochat-biases-uncapped": (
        "NanoChatForCausalLM",
        SMALL | PLAIN_ROPE | {"attention_bias": True, "final_logit_softcapping": None, "num_key_value_heads": 4},
    ),
    "persimmon": ("PersimmonForCausalLM", NEOX),
    "persimmon-no-head-norms": (
        "PersimmonForCausalLM",
        NEOX | {"qk_layernorm": False, "num_attention_heads": 2, "table_scale": 0.1, "seed": 3},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA | {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 3, "seed": 2},
    ),
    "gemma3-stretched": (
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "table_scale": 0.1,
            "seed": 2,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gpt-bigcode-many-keys": (
        "GPTBigCodeForCausalLM",
        GPT2 | {"multi_query": False, "n_inner": 48, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "glm": ("GlmForCausalLM", SMALL | PARTIAL | {"pad_token_id": None, "head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", SMALL | PARTIAL | {"pad_token_id": None, "head_dim": 8, "attention_bias": False}),
    "gptj": ("GPTJForCausalLM", GPTJ),
    "gptj-whole-heads": ("GPTJForCausalLM", GPTJ | {"rotary_dim": 8, "n_inner": 48}),
    "granite": (
        "GraniteForCausalLM",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "tie_word_embeddings": True,
            "table_scale": 0.03,
        },
    ),
    "granite-biases": ("GraniteForCausalLM", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "helium": ("HeliumForCausalLM", INTERLEAVED | {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax": (
        "HyperCLOVAXForCausalLM",
        SMALL | {"residual_multiplier": 0.5, "logits_scaling": 0.5, "embedding_multiplier": 3.0}
        | {"attention_multiplier": 0.2},
    ),
    "hyperclovax-plain": ("HyperCLOVAXForCausalLM", SMALL | {"attention_bias": True, "tie_word_embeddings": True}),
    "mpt": ("MptForCausalLM", MPT),
    "mpt-odd-heads": (
        "MptForCausalLM",
        MPT | {"n_heads": 6, "d_model": 48, "attn_config": {"softmax_scale": 0.3}},
    ),
    "mpt-clipped": ("MptForCausalLM", MPT | {"attn_config": {"clip_qkv": 1.0}, "seed": 4}),
    "nemotron": ("NemotronForCausalLM", SMALL | PARTIAL | {"head_dim": 8}),
    "nemotron-biases": (
        "NemotronForCausalLM",
        SMALL | {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "hidden_act": "silu"},
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-scales-untied": (
        "GPT2LMHeadModel",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 48, "tie_word_embeddings": False, "n_head": 2},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", NEOX | PARTIAL),
    "gpt-neox-serial": (
        "GPTNeoXForCausalLM",
        NEOX | {"use_parallel_residual": False, "attention_bias": False, "num_attention_heads": 2},
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", SMALL | {"head_dim": 16}),
    "hunyuan-alpha": (
        "HunYuanDenseV1ForCausalLM",
        SMALL | {"head_dim": 8, "attention_bias": True, "rope_parameters": ALPHA},
    ),
    "ministral": (
        "MinistralForCausalLM", SMALL | {"sliding_window": 6, "layer_types": [SLIDING, FULL], "head_dim": 16},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        SMALL | {"head_dim": 16, "pad_token_id": None, "rope_parameters": LLAMA4 | {"llama_4_scaling_beta": 0.6}},
    ),
    "ministral3-plain": (
        "Ministral3ForCausalLM",
        SMALL | {"head_dim": 8, "pad_token_id": None, "sliding_window": 7, "rope_parameters": LLAMA4},
    ),
    "olmo": ("OlmoForCausalLM", SMALL),
    "olmo-clipped": ("OlmoForCausalLM", SMALL | {"clip_qkv": 0.5, "seed": 4}),
    "olmo2": ("Olmo2ForCausalLM", SMALL | {"tie_word_embeddings": True}),
    "olmo2-biases": ("Olmo2ForCausalLM", SMALL | {"attention_bias": True, "num_attention_heads": 2}),
    "olmo3": (
        "Olmo3ForCausalLM",
        SMALL
        | {
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32},
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi": ("PhiForCausalLM", SMALL | PARTIAL),
    "phi-norms": ("PhiForCausalLM", SMALL | PARTIAL | {"qk_layernorm": True, "seed": 4, "initializer_range": 0.5}),
    "phi3": ("Phi3ForCausalLM", SMALL | {"sliding_window": 7, "pad_token_id": None}),
    "phi3-partial-longrope": (
        "Phi3ForCausalLM",
        SMALL
        | {
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 1.5, 2.5],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "seed-oss": ("SeedOssForCausalLM", SMALL | {"head_dim": 8}),
    "seed-oss-biases": (
        "SeedOssForCausalLM",
        SMALL | {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("SmolLM3ForCausalLM", SMALL | {"num_hidden_layers": 4, "pad_token_id": None}),
    "smollm3-windows": (
        "SmolLM3ForCausalLM",
        SMALL
        | {
            "use_sliding_window": True,
            "sliding_window": 7,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    "stablelm": ("StableLmForCausalLM", SMALL | PARTIAL),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        SMALL | PARTIAL | {"use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm-norms": ("StableLmForCausalLM", SMALL | PARTIAL | {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2ForCausalLM", SMALL | {"sliding_window": 7}),
    "starcoder2-plain": (
        "Starcoder2ForCausalLM",
        SMALL | {"use_bias": False, "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""architecture and fields of its config"""
NESTED = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral": "Mistral3ForConditionalGeneration",
    "ministral3": "Mistral3ForConditionalGeneration",
}
"""variant -> the architecture of a model for text and images of which it is the text part"""
