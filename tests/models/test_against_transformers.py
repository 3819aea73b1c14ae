"""Every architecture and variant: logits within a tolerance of transformers' in float32, and 64 greedy tokens equal."""

import dataclasses
from typing import Any

import pytest
import torch

from quire.config.model import ModelConfig
from tests.models.families import FAMILIES
from tests.models.mixtures import MIXTURES

# Largest difference of two logits, as a share of the largest logit; measured: up to 1e-5.
TOLERANCE = 5e-5
NUM_TOKENS = 64

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
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


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (23, 6)]


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int], padded_len: int) -> torch.Tensor:
    """transformers' logits of every token; padding behind them (unseen by them) fixes the length its rope goes by."""
    padded = torch.tensor([tokens + [0] * (padded_len - len(tokens))])
    return model(padded, use_cache=False).logits[0, : len(tokens)]


def assert_same_logits(ours: torch.Tensor, oracle: torch.Tensor) -> None:
    assert ours.shape == oracle.shape
    assert (ours - oracle).abs().max() <= TOLERANCE * oracle.abs().max()


def assert_matches(config: ModelConfig, oracle: Any, greedy_run: Any) -> None:
    """Chunked prefill and decode: each position's logits, and that transformers would have chosen the same tokens."""
    given = prompts(config.vocab_size)
    sequences, logits = greedy_run(config, given, chunk=5, num_tokens=NUM_TOKENS)
    for prompt, tokens, ours in zip(given, sequences, logits, strict=True):
        generated = tokens[len(prompt) :]
        assert len(generated) == NUM_TOKENS
        assert len(set(generated)) > 5, "degenerate output compares little"
        theirs = oracle_logits(oracle, tokens, config.max_model_len)
        assert_same_logits(ours, theirs[:-1])
        assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == generated


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, save_checkpoint: Any, greedy_run: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, oracle = save_checkpoint(architecture, **fields)
    config = ModelConfig.resolve(folder)
    assert config.dtype == "float32"
    assert_matches(config, oracle, greedy_run)


@pytest.mark.essential
def test_whole_prefill_equals_transformers(save_checkpoint: Any, paged_run: Any) -> None:
    from quire.models.weights.loader import load_model

    folder, oracle = save_checkpoint("MistralForCausalLM", **LLAMA, sliding_window=7)
    config = ModelConfig.resolve(folder)
    given = prompts(config.vocab_size)
    logits = paged_run(load_model(config), config, given).step([len(prompt) for prompt in given])
    for prompt, ours in zip(given, logits, strict=True):
        assert_same_logits(ours, oracle_logits(oracle, prompt, len(prompt)))


@pytest.mark.parametrize("max_model_len", [96, 32], ids=["stretched", "original"])
def test_dynamic_rope_goes_by_max_model_len(max_model_len: int, save_checkpoint: Any, greedy_run: Any) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    fields = LLAMA | {"max_position_embeddings": 32, "rope_parameters": scaling}
    folder, oracle = save_checkpoint("LlamaForCausalLM", **fields)
    config = dataclasses.replace(ModelConfig.resolve(folder), max_model_len=max_model_len)
    assert config.max_context_len == 128
    check_first_tokens(config, oracle, greedy_run)


@pytest.mark.parametrize("max_model_len", [128, 32], ids=["long", "short"])
def test_longrope_goes_by_max_model_len(max_model_len: int, save_checkpoint: Any, greedy_run: Any) -> None:
    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA | {"rope_parameters": LONGROPE})
    config = dataclasses.replace(ModelConfig.resolve(folder), max_model_len=max_model_len)
    check_first_tokens(config, oracle, greedy_run)


def check_first_tokens(config: ModelConfig, oracle: Any, greedy_run: Any) -> None:
    """As `assert_matches`, for as many tokens as fit."""
    given = prompts(config.vocab_size)
    num_tokens = min(NUM_TOKENS, config.max_model_len - max(len(prompt) for prompt in given))
    sequences, logits = greedy_run(config, given, chunk=8, num_tokens=num_tokens)
    for prompt, tokens, ours in zip(given, sequences, logits, strict=True):
        theirs = oracle_logits(oracle, tokens, config.max_model_len)
        assert_same_logits(ours, theirs[:-1])
        assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]


@pytest.mark.essential
def test_embedded_checkpoint_equals_transformers(greedy_run: Any) -> None:
    import transformers

    config = dataclasses.replace(ModelConfig.resolve(None, dtype="float32"), max_model_len=128)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32).eval()
    assert_matches(config, oracle, greedy_run)
