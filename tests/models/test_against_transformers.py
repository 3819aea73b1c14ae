"""Every architecture and variant: logits within a tolerance of transformers' in float32, and 64 greedy tokens equal."""

import dataclasses
from typing import Any

import pytest
import torch

from quire.config.model import ModelConfig
from tests.models.variants import LLAMA, LONGROPE, VARIANTS

# Largest difference of two logits, as a share of the largest logit; measured: up to 1e-5.
TOLERANCE = 5e-5
NUM_TOKENS = 64


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
