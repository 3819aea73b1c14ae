"""Several engines in one process, each with threads of its own."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from quire import LLM, SamplingParams, kernels
from tests.kernels.isas import native, needs_native

PROMPTS = ["The engine", "A pool of threads is", "Two of them"]


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_that_run_at_once_give_the_bits_that_each_gives_alone(dtype: str) -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True, logprobs=3)
    default = kernels.num_threads()

    def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        return [
            (list(one.token_ids), [entry.logprob for at in one.logprobs or () for entry in at.values()])
            for one in outputs
        ]

    cpu = min(os.sched_getaffinity(0))
    engines = [
        LLM(dtype=dtype, num_gpu_blocks_override=64, num_threads=1),
        LLM(dtype=dtype, num_gpu_blocks_override=64, num_threads=2),
        LLM(dtype=dtype, num_gpu_blocks_override=64, cpu_list=f"{cpu}"),
    ]
    alone = [answers(llm) for llm in engines]
    assert alone[0] == alone[1] == alone[2], "the number of threads changes no bit"
    with ThreadPoolExecutor(len(engines)) as callers:
        for _ in range(3):
            assert list(callers.map(answers, engines)) == alone
    assert kernels.num_threads() == default, "an engine's own threads are not the default ones"


@needs_native
def test_pools_compute_at_the_same_time() -> None:
    """Each region waits for one of the other pool: with one pool for both, the first would wait for ever."""
    meet = Barrier(2)

    def run(count: int) -> list[int]:
        with native.ThreadPool(count, []) as _:
            seen = [kernels.num_threads()]
            meet.wait(60)
            assert native.exercise_pool(2000) == 0
            meet.wait(60)
            with kernels.backend_for("cpu").threads(3):
                seen.append(kernels.num_threads())
            return [*seen, kernels.num_threads()]

    with ThreadPoolExecutor(2) as callers:
        assert list(callers.map(run, [1, 4])) == [[1, 3, 1], [4, 3, 4]]
