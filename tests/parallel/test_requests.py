"""Requests of every kind on several ranks: adapters, drafts, heads that draft, swapped blocks, and many mixed ones."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineStats, LoRARequest, SamplingParams
from tests.engine import test_mixed_requests as mixed
from tests.kernels.isas import needs_native
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter
from tests.parallel.ends import TINY
from tests.parallel.ranks import answers, in_threads, of_ranks
from tests.speculation import heads

pytestmark = needs_native
PROMPTS = [[7 * i % 500 + 3 for i in range(29)], [5, 6, 7], [7 * i % 500 + 3 for i in range(20)] + [4], [9] * 3]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=1, max_tokens=9, ignore_eos=True, logprobs=0, presence_penalty=0.5),
    SamplingParams(temperature=0.8, seed=2, n=2, max_tokens=9, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.2, seed=3, max_tokens=12, ignore_eos=True, logprobs=0),
]
formats_and_drafts = pytest.mark.parametrize(
    "given",
    [
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "float32"},
        {"kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "quire-draft", "num_speculative_tokens": 3, "adaptive": False}},
    ],
    ids=lambda given: " ".join(given),
)


def check_mixed_requests(seed: int, count: int, dtype: str, engines: Sequence[dict[str, Any]]) -> list[EngineStats]:
    """In small caches of engines of these kinds they must equal one process. Returns what the engines counted."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, mixed.VOCAB) for _ in range(mixed.LONGEST)]
    # And twelve that start together, whatever grammars wait for, and grow to twice the cache.
    prompts = [[3 + i] * 15 for i in range(12)] + [mixed.any_prompt(rng, shared) for _ in range(count)]
    growing = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True, logprobs=0)
    params = [growing] * 12 + [mixed.any_params(rng) for _ in range(count)]
    given: dict[str, Any] = {"dtype": dtype, "max_model_len": 64}
    expected = mixed.run(LLM(**given, num_gpu_blocks_override=400), prompts, params)
    small = {"num_gpu_blocks_override": 24, "max_num_seqs": 24, "max_num_batched_tokens": 96, "swap_space": 0.001}
    stats = list[EngineStats]()
    for kind in engines:
        with in_threads():
            llm = LLM(**given, **small, **kind, num_threads=1)
            assert mixed.run(llm, prompts, params) == expected
            stats.append(llm.engine.stats())
            assert stats[-1].num_preemptions > 0
            llm.engine.executor.close()
    return stats


@pytest.mark.parametrize(
    ("part", "count"),
    [pytest.param(0, 80, marks=pytest.mark.slow), (1, 40), pytest.param(0, 250, marks=pytest.mark.thorough)],
)
def test_mixed_requests_in_a_small_cache_equal_one_process(part: int, count: int) -> None:
    ranks = [{"tensor_parallel_size": num_ranks} for num_ranks in (2, 3, 4)]
    check_mixed_requests(part, count, ("bfloat16", "float32")[part], ranks)


@formats_and_drafts
def test_formats_and_drafts_equal_one_process(given: dict[str, Any]) -> None:
    expected = of_ranks(1, PROMPTS, PARAMS, **TINY, **given)
    assert of_ranks(2, PROMPTS, PARAMS, **TINY, **given) == expected
    if "model" not in given.get("speculative_config", {}):  # whose layers have two heads
        for num_ranks in (3, 4):
            assert of_ranks(num_ranks, PROMPTS, PARAMS, **TINY, **given) == expected


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_that_draft_run_in_all_ranks(kind: str, tmp_path: Path) -> None:
    head, names = (heads.eagle(), heads.EAGLE_NAMES) if kind == "eagle" else (heads.eagle3(), heads.EAGLE3_NAMES)
    named = {} if kind == "eagle" else {"architectures": ["LlamaForCausalLMEagle3"]}
    folder = str(heads.write(tmp_path, head, names, **named))
    drafting = {"model": folder, "num_speculative_tokens": 3, "adaptive": False}
    expected = of_ranks(1, PROMPTS, PARAMS, **TINY)
    with in_threads():
        llm = LLM(**TINY, tensor_parallel_size=2, num_threads=1, speculative_config=drafting)
        assert [told[0][0].token_ids for told in answers(llm, PROMPTS, PARAMS)] == [
            told[0][0].token_ids for told in expected
        ]
        assert llm.engine.stats().drafts
        assert not llm.engine.scheduler.drafting.num_errors
        llm.engine.executor.close()


def of_adapters(path: Path, **how: Any) -> list[Any]:
    """The outputs of requests for two adapters, one of which is loaded at a time, and for none."""
    with in_threads():
        llm = LLM(**TINY, enable_lora=True, max_loras=1, num_threads=1, **how)
        sizes = tiny_sizes(llm.engine.model_config)
        for seed in (1, 2):
            if not (path / str(seed)).exists():
                write_adapter(path / str(seed), make_tensors(sizes, 2, seed=seed), r=2, lora_alpha=2)
        adapters = [LoRARequest(f"a{seed}", seed, str(path / str(seed))) for seed in (1, 2)]
        of = [adapters[0], adapters[1], None, adapters[0]]
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=of)
        llm.engine.executor.close()
        return [output.outputs for output in outputs]


def test_adapters_are_loaded_and_unloaded_in_all_ranks(tmp_path: Path) -> None:
    expected, plain = of_adapters(tmp_path), of_ranks(1, PROMPTS, PARAMS, **TINY)
    assert [each[0].token_ids for each in expected] != [outputs[0].token_ids for outputs, _, _ in plain]
    assert of_adapters(tmp_path, tensor_parallel_size=2) == expected
    assert of_adapters(tmp_path, tensor_parallel_size=3) == expected
