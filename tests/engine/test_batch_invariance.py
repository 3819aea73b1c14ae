"""The real model: whatever runs beside a request, it gets bitwise what it gets alone with caching off."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.runner.sampling.sampler import Sampler
from tests.effort import examples


def make_prompts(num_prompts: int, vocab_size: int, longest: int) -> list[list[int]]:
    """Mixed lengths, some sharing a beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(3, vocab_size) for _ in range(longest)]
    prompts = []
    for i in range(num_prompts):
        length = rng.randint(1, longest)
        own = [rng.randrange(3, vocab_size) for _ in range(length)]
        keep = rng.randint(0, length) if i % 3 == 0 else 0
        prompts.append(shared[:keep] + own[keep:])
    return prompts


def run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, preempt: bool = False
) -> list[list[list[int]]]:
    """Token ids of every sample in prompt order; the engine's blocks are checked after every step and must all be back
    at the end. With `preempt`, one of the running requests in turn loses its blocks before every step."""
    engine = llm.engine
    ids = [f"{id(prompts)}-{i}" for i in range(len(prompts))]
    for request_id, prompt, param in zip(ids, prompts, params, strict=True):
        engine.add_request(request_id, prompt, param)
    done = {}
    while engine.has_unfinished_requests():
        running = engine.requests.running
        if preempt and running:
            engine.scheduler.preemptor.preempt(running[engine.scheduler.num_steps % len(running)])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = [sample.token_ids for sample in output.outputs]
        engine.blocks.check_integrity()
    assert engine.blocks.num_used_blocks == 0
    return [done[i] for i in ids]


def mixed_params(num_prompts: int) -> list[SamplingParams]:
    """Greedy and seeded random ones, of different lengths."""
    rng = random.Random(1)
    return [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 24), ignore_eos=True)
        if i % 2
        else SamplingParams(
            temperature=0.9, top_p=0.9, top_k=40, seed=i, max_tokens=rng.randint(1, 24), ignore_eos=True
        )
        for i in range(num_prompts)
    ]


ROOMY = 128
"""blocks: room for all. Every step checks each block of the cache, and by default it has tens of thousands."""

STORAGE = [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), STORAGE)
@pytest.mark.parametrize("count", [28, pytest.param(64, marks=pytest.mark.thorough)])
def test_mixed_prompts_in_a_tiny_cache_equal_their_solo_runs(dtype, kv_cache_dtype, count):
    storage = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    solo = LLM(**storage, enable_prefix_caching=False, max_model_len=96, max_num_seqs=1, num_gpu_blocks_override=ROOMY)
    prompts, params = make_prompts(count, 8192, 60), mixed_params(count)
    expected = [run(solo, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert len({tuple(tokens) for (tokens,) in expected}) > count // 2, "outputs too alike to tell requests apart"
    preemptions = swapped_blocks = 0
    for num_blocks, caching, mode in [
        (6, True, "recompute"),
        (6, False, "recompute"),
        (6, True, "swap"),
        (9, False, "swap"),
        (17, True, None),
        (40, False, None),
    ]:
        llm = LLM(
            **storage,
            num_gpu_blocks_override=num_blocks,
            max_num_batched_tokens=64,
            enable_prefix_caching=caching,
            max_model_len=96,
            swap_space=0.001,
            preemption_mode=mode,
        )
        assert run(llm, prompts, params) == expected, f"{num_blocks} blocks, caching {caching}, {mode}"
        stats = llm.engine.stats()
        preemptions += stats.num_preemptions
        swapped_blocks += stats.num_swapped_blocks
    assert preemptions > 0
    assert swapped_blocks > 0


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), STORAGE)
def test_a_preemption_at_every_step_changes_nothing(dtype, kv_cache_dtype):
    """Both ways, with and without caching, single answers and samples: bit for bit what each request gives alone."""
    storage = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    solo = LLM(**storage, enable_prefix_caching=False, max_model_len=96, max_num_seqs=3, num_gpu_blocks_override=ROOMY)
    prompts, params = make_prompts(12, 8192, 60), mixed_params(12)
    params[3] = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=9, ignore_eos=True)
    params[7] = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=17, ignore_eos=True)
    expected = [run(solo, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert len({tuple(tokens) for tokens in expected[3]}) == 3
    for mode in ("recompute", "swap"):
        for caching in (True, False):
            llm = LLM(
                **storage,
                num_gpu_blocks_override=20,
                max_num_batched_tokens=128,
                enable_prefix_caching=caching,
                max_model_len=96,
                max_num_seqs=6,
                swap_space=0.01,
                preemption_mode=mode,
            )
            assert run(llm, prompts, params, preempt=True) == expected, f"{mode}, caching {caching}"
            scheduler = llm.engine.scheduler
            assert scheduler.preemptor.num_preemptions > scheduler.num_steps // 2
            assert (scheduler.preemptor.num_preemptions_by_swap > scheduler.num_steps // 2) == (mode == "swap")


@pytest.mark.parametrize("budget", [1024, 40])
def test_requests_with_one_new_prefix_compute_it_once(budget):
    """In one step they join the first one's blocks; where the prefix takes several steps they wait for it."""
    shared, params = make_prompts(3, 8192, 400)[0][:70], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[*shared, 100 + i] for i in range(20)]
    solo = LLM(enable_prefix_caching=False, max_model_len=96, max_num_seqs=1, num_gpu_blocks_override=ROOMY)
    expected = run(solo, prompts, [params] * 20)
    llm = LLM(max_model_len=96, max_num_batched_tokens=budget, num_gpu_blocks_override=ROOMY)
    executed, counts = llm.engine.executor.execute, []

    def execute(batch):
        counts.append(batch.num_tokens)
        return executed(batch)

    llm.engine.executor.execute = execute
    assert run(llm, prompts, [params] * 20) == expected
    num_once = len(shared) // 16 * 16
    assert sum(counts) <= num_once + 20 * (len(prompts[0]) - num_once + 7)
    assert llm.engine.stats().prefix_cache["hit"] >= 19 * num_once


@pytest.mark.essential
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_logits_are_bitwise_the_same_in_any_chunking_and_block_size(monkeypatch, kv_cache_dtype):
    """Not only the tokens: every logit of every drawn position."""
    original = Sampler.sample

    def record(sampler, logits, sequences):
        result = original(sampler, logits, sequences)
        rows.append(logits.clone())
        return result

    monkeypatch.setattr(Sampler, "sample", record)
    prompts = make_prompts(6, 8192, 50)
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    results = []
    for batched_tokens, block_size, threads in [(2048, 16, 2), (7, 16, 1), (64, 4, 2), (33, 1, 1)]:
        llm = LLM(
            max_num_batched_tokens=batched_tokens,
            block_size=block_size,
            kv_cache_memory="32MiB",
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=False,
            num_threads=threads,
        )
        by_prompt = []
        for prompt, param in zip(prompts, params, strict=True):
            rows: list[torch.Tensor] = []
            run(llm, [prompt], [param])
            by_prompt.append(torch.cat(rows))
        results.append(torch.cat(by_prompt))
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.fixture(scope="module")
def solo_outputs():
    """Twelve requests, each run alone."""
    solo = LLM(enable_prefix_caching=False, max_model_len=96, max_num_seqs=1, num_gpu_blocks_override=ROOMY)
    prompts, params = make_prompts(12, 8192, 60), mixed_params(12)
    return prompts, params, [run(solo, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]


@pytest.mark.essential
@settings(max_examples=examples(15), deadline=None)
@given(
    order=st.permutations(range(12)),
    num_requests=st.integers(1, 12),
    num_blocks=st.integers(24, 60),
    block_size=st.sampled_from([1, 3, 4, 16]),
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(1, 70),
    num_threads=st.integers(1, 3),
    caching=st.booleans(),
)
def test_any_schedule_equals_the_solo_runs(
    solo_outputs,
    order,
    num_requests,
    num_blocks,
    block_size,
    max_num_seqs,
    max_num_batched_tokens,
    num_threads,
    caching,
):
    prompts, params, expected = solo_outputs
    chosen = order[:num_requests]
    llm = LLM(
        block_size=block_size,
        num_gpu_blocks_override=max(num_blocks, -(-96 // block_size)),
        max_model_len=96,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
        enable_prefix_caching=caching,
    )
    assert run(llm, [prompts[i] for i in chosen], [params[i] for i in chosen]) == [expected[i] for i in chosen]


def test_a_preempted_request_gets_the_same_random_tokens():
    prompts = [[10 + i] * 20 for i in range(6)]
    params = [SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)] * 6
    roomy = LLM(max_model_len=96, num_gpu_blocks_override=ROOMY)
    tight = LLM(max_model_len=96, num_gpu_blocks_override=8)
    assert run(roomy, prompts, params) == run(tight, prompts, params)
    assert tight.engine.stats().num_preemptions > 0
    assert roomy.engine.stats().num_preemptions == 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("block_size", [3, 16])
def test_what_earlier_requests_left_in_the_cache_does_not_matter(block_size, kv_cache_dtype):
    """Not even NaNs in slots that nobody has written yet."""
    prompts, params = make_prompts(5, 8192, 40), mixed_params(5)
    llm = LLM(
        max_model_len=96,
        block_size=block_size,
        num_gpu_blocks_override=200,
        enable_prefix_caching=False,
        kv_cache_dtype=kv_cache_dtype,
    )
    expected = run(llm, prompts, params)
    llm.engine.executor.cache_engine.blocks.fill_(255)  # every element a NaN, or every scale
    assert run(llm, prompts, params) == expected
