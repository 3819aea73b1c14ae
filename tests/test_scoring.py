"""Scores of the embedded checkpoint: the same bits whatever the cache holds and however prompts are cut and batched."""

import math
from functools import cache

import pytest

from quire import LLM, SamplingParams

CONTEXT = "import json\n\ndef save(path, data):\n    with open(path, 'w') as file:\n        json."
CONTINUATIONS = ["dump(data, file)", "load(file)", "xyz"]


@cache
def engine(**arguments: object) -> LLM:
    return LLM("quire-tiny", **{"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "8MiB"} | arguments)


def test_scores_are_the_same_alone_together_cached_and_in_chunks() -> None:
    llm = engine()
    together = llm.score_tokens(CONTEXT, CONTINUATIONS, use_tqdm=False)
    cached = [llm.score_tokens(CONTEXT, [text], use_tqdm=False)[0] for text in CONTINUATIONS]
    assert cached[0].num_cached_tokens > 0
    cold = engine(enable_prefix_caching=False, max_num_batched_tokens=7)
    alone = [cold.score_tokens(CONTEXT, [text], use_tqdm=False)[0] for text in CONTINUATIONS]
    for scores in zip(together, cached, alone, strict=True):
        assert len({(tuple(score.token_ids), tuple(score.logprobs), tuple(score.ranks)) for score in scores}) == 1


def test_prompt_logprobs_scores_and_output_logprobs_agree() -> None:
    llm = engine()
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=0)
    first, again = (llm.generate(CONTEXT, params, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    (output,) = first.outputs
    assert [entries[t].rank for t, entries in zip(output.token_ids, output.logprobs, strict=True)] == [1] * 8
    told = [entries[t].logprob for t, entries in zip(output.token_ids, output.logprobs, strict=True)]
    (score,) = llm.score_tokens([first.prompt_token_ids], [output.token_ids], use_tqdm=False)
    assert (score.logprobs, score.is_greedy) == (told, [True] * 8)
    assert output.cumulative_logprob == pytest.approx(score.sum_logprob)
    in_prompt = [
        entries[t].logprob for t, entries in zip(first.prompt_token_ids[1:], first.prompt_logprobs[1:], strict=True)
    ]
    (perplexity,) = llm.perplexity([first.prompt_token_ids], use_tqdm=False)
    assert perplexity == math.exp(-math.fsum(in_prompt) / len(in_prompt))


def test_the_best_of_several_samples_is_the_likeliest() -> None:
    params = {"temperature": 1.0, "max_tokens": 6, "seed": 1, "logprobs": 0}
    (every,) = engine().generate(CONTEXT, SamplingParams(n=5, **params), use_tqdm=False)
    (best,) = engine().generate(CONTEXT, SamplingParams(n=2, best_of=5, **params), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda output: -output.cumulative_logprob)
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.logprobs for output in best.outputs] == [output.logprobs for output in ranked[:2]]
