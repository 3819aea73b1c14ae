"""Requests that ask for everything a request can ask for, side by side in a tiny cache: each gets what it gets
alone, to the last bit of its log-probabilities.

`pytest -m thorough tests/engine/test_mixed_requests.py` runs 1,000 requests.
"""

import random

import pytest

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

NUM_PARTS, LONGEST, VOCAB = 4, 40, 8192
STRUCTURES = (
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": r"[a-c]{2,6}(-\d+)?"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)


def lower_even(token_ids, logits):
    logits[::2] -= 0.5 + len(token_ids) % 2
    return logits


def any_prompt(rng: random.Random, shared: list[int]) -> list[int]:
    """Many have a beginning in common, of any length."""
    length = rng.randint(1, LONGEST)
    kept = rng.randint(0, length) if rng.random() < 0.5 else 0
    return shared[:kept] + [rng.randrange(3, VOCAB) for _ in range(length - kept)]


def any_params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    """Each setting is there or not, by chance."""

    def some(share: float, value: object, otherwise: object) -> object:
        return value if rng.random() < share else otherwise

    if rng.random() < 0.06:
        return BeamSearchParams(
            beam_width=rng.randint(1, 4), max_tokens=rng.randint(1, 8), length_penalty=rng.choice((0.0, 1.0, 1.5))
        )
    is_greedy, n, max_tokens = rng.random() < 0.3, some(0.2, rng.randint(2, 3), 1), rng.randint(1, 14)
    return SamplingParams(
        n=n,
        best_of=None if is_greedy or rng.random() < 0.8 else n + rng.randint(0, 2),
        temperature=0.0 if is_greedy else rng.choice((0.5, 1.0, 1.7)),
        top_p=some(0.4, rng.uniform(0.2, 0.99), 1.0),
        top_k=some(0.4, rng.randint(1, 60), 0),
        min_p=some(0.2, rng.uniform(0.0, 0.2), 0.0),
        presence_penalty=some(0.2, rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(0.2, rng.uniform(-2, 2), 0.0),
        repetition_penalty=some(0.2, rng.uniform(0.7, 1.6), 1.0),
        seed=rng.randrange(2**40),
        max_tokens=max_tokens,
        min_tokens=some(0.2, rng.randint(0, max_tokens), 0),
        stop=some(0.2, ["e", "th", "\n"], None),
        stop_token_ids=some(0.1, [rng.randrange(VOCAB) for _ in range(300)], None),
        logprobs=some(0.3, rng.randint(0, 5), None),
        prompt_logprobs=some(0.2, rng.randint(0, 3), None),
        logit_bias=some(0.2, {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(20)}, None),
        bad_words=some(0.1, ["the", "return", "self."], None),
        allowed_token_ids=some(0.1, sorted({rng.randrange(VOCAB) for _ in range(500)}), None),
        logits_processors=some(0.05, [lower_even], None),
        structured_outputs=some(0.15, StructuredOutputsParams(**rng.choice(STRUCTURES)), None),
        ignore_eos=rng.random() < 0.5,
        priority=rng.randrange(3),
        tenant=rng.choice("ab"),
    )


def told(output) -> tuple[object, ...]:
    """What a caller sees of an answer, but for times and hits."""
    return output.outputs, output.prompt_logprobs, output.error


def run(llm: LLM, prompts, params) -> list[tuple[object, ...]]:
    engine, done = llm.engine, {}
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, its_params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = told(output)
        engine.blocks.check_integrity()
    assert engine.blocks.num_used_blocks == 0
    return [done[i] for i in range(len(prompts))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("count", [100, pytest.param(250, marks=pytest.mark.thorough)])
def test_requests_of_every_kind_side_by_side_equal_their_solo_runs(part, count):
    rng = random.Random(part)
    shared = [rng.randrange(3, VOCAB) for _ in range(LONGEST)]
    prompts, params = [any_prompt(rng, shared) for _ in range(count)], [any_params(rng) for _ in range(count)]
    storage = {"dtype": ("bfloat16", "float32")[part % 2], "max_model_len": 64}
    alone = LLM(**storage, enable_prefix_caching=False, num_gpu_blocks_override=40)
    expected = [run(alone, [prompt], [its_params])[0] for prompt, its_params in zip(prompts, params, strict=True)]
    assert len({output.text for outputs, _, _ in expected for output in outputs}) > count // 2
    together = LLM(
        **storage,
        num_gpu_blocks_override=24,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        swap_space=0.001,
        scheduling_policy=("fcfs", "priority", "fair", "prefix")[part],
    )
    for got, wanted in zip(run(together, prompts, params), expected, strict=True):
        assert got == wanted
    assert together.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_logits_processor_that_fails_ends_its_own_request_alone(n):
    def fail_third(token_ids, logits):
        return logits / (2 - len(token_ids) if len(token_ids) < 2 else "nothing")

    llm = LLM(max_model_len=64, num_gpu_blocks_override=40)
    prompts, fine = [[5, 6, 7], [9, 8]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    failing = SamplingParams(
        n=n, temperature=0.7, seed=1, max_tokens=8, ignore_eos=True, logits_processors=[fail_third]
    )
    expected = run(llm, prompts, [fine, fine])[1]
    (outputs, _, error), beside = run(llm, prompts, [failing, fine])
    assert beside == expected
    assert "logits processor" in error
    assert "fail_third failed: TypeError" in error
    assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [("abort", 2)] * n
