"""A model of full attention and sliding windows through the whole engine: transformers' tokens in less memory."""

import pytest
import torch

from quire import LLM, SamplingParams

WINDOW = 8
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
}


@pytest.fixture
def checkpoint(save_checkpoint):
    vocab_size = LLM(max_model_len=16, num_gpu_blocks_override=8).engine.tokenizer.vocab_size
    return save_checkpoint("Qwen2ForCausalLM", vocab_size=vocab_size, **SHAPE)


def make_llm(folder, **kwargs) -> LLM:
    """There is room for all by default, but not more: every step checks each block of the cache."""
    arguments = {"num_gpu_blocks_override": 1000, "block_size": 4, "max_model_len": 200} | kwargs
    return LLM(str(folder), tokenizer="quire-tiny", dtype="float32", **arguments)


def run(llm, prompts, max_tokens):
    """Tokens of all prompts, and the most blocks held at the end of a step."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, params)
    tokens, peak = {}, 0
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            tokens[int(output.request_id)] = output.outputs[0].token_ids
        llm.engine.blocks.check_integrity()
        peak = max(peak, llm.engine.blocks.num_used_blocks)
    return [tokens[i] for i in range(len(prompts))], peak


@torch.inference_mode()
def oracle_tokens(oracle, prompt, max_tokens):
    ids = torch.tensor([prompt])
    output = oracle.generate(ids, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


def test_tokens_are_transformers_and_blocks_that_slid_out_are_free(checkpoint):
    folder, oracle = checkpoint
    shared = [7 * i % 500 + 3 for i in range(40)]
    prompts = [shared + [50 + i] * (10 * i + 1) for i in range(3)]
    expected = [oracle_tokens(oracle, prompt, 40) for prompt in prompts]
    llm = make_llm(folder, max_num_batched_tokens=16)
    tokens, peak = run(llm, prompts, 40)
    assert tokens == expected
    groups = llm.engine.plan.kv_cache.groups
    assert [getattr(group.spec, "sliding_window", None) for group in groups] == [None, WINDOW, WINDOW, WINDOW]
    as_if_full = sum(-(-(len(prompt) + 40) // 4) for prompt in prompts) * len(groups)
    assert peak < as_if_full / 2, f"{peak} blocks, {as_if_full} if all layers were full"
    again, _ = run(llm, prompts, 40)  # now the prompts are in the cache, as far as the windows need them
    assert again == expected
    assert llm.engine.stats().prefix_cache["hit_device"] >= sum(len(prompt) // 4 * 4 - 4 for prompt in prompts)


def test_in_int8_tokens_are_those_of_solo_runs(checkpoint):
    folder, _ = checkpoint
    shared = [7 * i % 500 + 3 for i in range(40)]
    prompts = [shared + [50 + i] * (10 * i + 1) for i in range(4)]
    solo = make_llm(folder, kv_cache_dtype="int8", enable_prefix_caching=False)
    expected = [run(solo, [prompt], 30)[0][0] for prompt in prompts]
    llm = make_llm(folder, kv_cache_dtype="int8", max_num_batched_tokens=16, num_gpu_blocks_override=130)
    assert [run(llm, prompts, 30)[0] for _ in range(2)] == [expected] * 2
    assert llm.engine.stats().prefix_cache["hit_device"] > 0


def test_a_context_of_full_layers_alone_would_not_fit(checkpoint):
    """With 75 blocks, four groups of full attention would hold 72 tokens; with windows there is room for many more."""
    folder, oracle = checkpoint
    llm = make_llm(folder, max_num_batched_tokens=8, num_gpu_blocks_override=75)
    assert 75 // 4 * 4 == 72
    prompt = [5 + 3 * i % 400 for i in range(120)]
    assert run(llm, [prompt], 30)[0] == [oracle_tokens(oracle, prompt, 30)]
    assert llm.engine.scheduler.preemptor.num_preemptions == 0
