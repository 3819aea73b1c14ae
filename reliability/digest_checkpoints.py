"""Small random checkpoints of every model family, for `reliability.digest`: made by transformers from a fixed seed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 8192
"""that of quire-tiny, whose tokenizer these checkpoints use"""
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "init_std": 0.4,
    "eos_token_id": 2,
}
TIED = {"tie_word_embeddings": True}
SCALED = {"rope_theta": 500.0, "original_max_position_embeddings": 32}
LLAMA3 = SCALED | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = SCALED | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 4.5, 5.0, 6.0, 8.0],
}
DYNAMIC = {"max_position_embeddings": 32} | {
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
}
BY_LAYER = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", OPT),
    "opt post-norm projected": ("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt untied plain": (
        "OPT",
        OPT | {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "llama": ("Llama", LLAMA),
    "llama tied biases": ("Llama", LLAMA | TIED | {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("Llama", LLAMA | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama linear": ("Llama", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama dynamic": ("Llama", LLAMA | DYNAMIC),
    "llama yarn": ("Llama", LLAMA | {"rope_parameters": SCALED | {"rope_type": "yarn", "factor": 4.0}}),
    "llama llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3}),
    "llama longrope": ("Llama", LLAMA | {"rope_parameters": LONGROPE}),
    "mistral window": ("Mistral", LLAMA | {"sliding_window": 7}),
    "mistral full": ("Mistral", LLAMA | {"sliding_window": None, "head_dim": 32}),
    "qwen2 tied": ("Qwen2", LLAMA | TIED),
    "qwen2 window by layer": ("Qwen2", LLAMA | BY_LAYER | {"max_window_layers": 1}),
    "qwen2 layer types": ("Qwen2", LLAMA | BY_LAYER | {"sliding_window": 20, "layer_types": LAYER_TYPES}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 32}),
    "qwen3 tied biases": ("Qwen3", LLAMA | TIED | {"head_dim": 16, "attention_bias": True}),
}
"""name -> (family, fields of its configuration)"""


def save_checkpoint(variant: str, folder: Path) -> Path:
    """Save the variant below `folder`, in float32, unless it exists already; returns its own folder."""
    transformers: Any = importlib.import_module("transformers")
    saved = folder / variant.replace(" ", "-")
    if saved.exists():
        return saved
    transformers.utils.logging.disable_progress_bar()
    family, fields = VARIANTS[variant]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**fields)
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(
                "bias"
            ):  # transformers initializes them to 1 and 0, which would hide mistakes
                torch.nn.init.normal_(parameter.data, mean=float(name.endswith("norm.weight")), std=0.2)
        model.save_pretrained(saved)
    return saved
