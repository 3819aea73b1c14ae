"""Two engines in one process: they share the thread pool and take turns, region by region."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import LLM, SamplingParams, kernels
from quire.kernels.backend import native

PROMPTS = ["The engine", "A pool of threads is", "Two of them"]


@pytest.mark.skipif(native is None, reason="the native extension is not in use")
def test_engines_driven_by_two_threads_say_what_each_says_alone() -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)
    before = kernels.num_threads()

    def texts(llm: LLM) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    engines = [
        LLM(dtype="float32", num_gpu_blocks_override=64, cpu_list=str(min(os.sched_getaffinity(0)))),
        LLM(dtype="bfloat16", num_gpu_blocks_override=64, num_threads=3),
    ]
    try:
        assert kernels.num_threads() == 3, "the last engine that says how many"
        alone = [texts(llm) for llm in engines]
        with ThreadPoolExecutor(2) as callers:
            for _ in range(3):
                assert list(callers.map(texts, engines)) == alone
    finally:
        kernels.set_num_threads(before)
