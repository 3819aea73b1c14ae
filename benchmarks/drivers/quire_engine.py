"""Quire: `quire_engine CHECKPOINT [LLM_ARGUMENTS_AS_JSON]`. It also measures the machine and single decode steps."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from benchmarks.drivers.protocol import TEMPERATURE, TOP_P, Handler, random_prompts, serve, timed

if TYPE_CHECKING:
    from quire.common.batch import Batch

_WARM_UP_STEPS = 2
_SMALL_KERNELS = (
    "embedding", "rms_norm", "add_rms_norm", "rotary_embedding", "write_kv", "gated_activation", "sample",
)  # fmt: skip


def load() -> Mapping[str, Handler]:
    """Load the engine."""
    from quire import LLM, EngineArgs, SamplingParams
    from quire.cli.bench.limits import Limits, WeightCosts

    arguments: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_model_len": 4096}
    # The same prompts come in each round: answers of earlier rounds would be drafts that are always right.
    arguments["speculative_config"] = {"method": "off"}
    arguments |= json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    llm = LLM(sys.argv[1], **arguments)
    plan, executor = llm.engine.plan, llm.engine.executor
    block_size = plan.kv_cache.block_size
    loaded = EngineArgs(**arguments).lora_requests()

    def generate(
        num_prompts: int, input_len: int, output_len: int, adapters: int = 0, sampled: bool = False
    ) -> dict[str, Any]:
        how = {"temperature": TEMPERATURE, "top_p": TOP_P} if sampled else {"temperature": 0}
        params = SamplingParams(**how, max_tokens=output_len, ignore_eos=True)
        prompts = random_prompts(num_prompts, input_len)
        lora = [loaded[i % adapters] for i in range(num_prompts)] if adapters else None
        return {"elapsed_s": timed(lambda: llm.generate(prompts, params, use_tqdm=False, lora_request=lora))}

    def limits(precision: str = "bfloat16") -> dict[str, Any]:
        found = Limits.measure(precision)
        return {"read_bytes_per_s": found.read_bytes_per_s, "flops_per_s": found.flops_per_s}

    def decode(num_seqs: int, context: int, num_steps: int) -> dict[str, Any]:
        """Time decode steps of the executor, without the scheduler."""
        batch = _batch(num_seqs, 1, context, block_size)
        times = [timed(lambda: executor.execute(batch)) for _ in range(_WARM_UP_STEPS + num_steps)]
        kv_bytes = num_seqs * context * plan.kv_cache.block_bytes / block_size
        return {"step_s": statistics.median(times[_WARM_UP_STEPS:]), "kv_bytes": kv_bytes}

    def parts(num_seqs: int, num_tokens: int, context: int, num_steps: int) -> dict[str, Any]:
        """Time whole steps, and steps whose kernels are called one at a time from Python instead of replayed."""
        batch = _batch(num_seqs, num_tokens, context, block_size)
        steps, kernels = list[float](), list[dict[str, float]]()
        for _ in range(_WARM_UP_STEPS + num_steps):  # interleaved, because the machine's speed changes
            steps.append(timed(lambda: executor.execute(batch)))
            kernels.append(kernel_times(lambda: executor.execute(batch)))
        found = {part: statistics.median(times[part] for times in kernels[_WARM_UP_STEPS:]) for part in kernels[-1]}
        return {"step_s": statistics.median(steps[_WARM_UP_STEPS:])} | found

    return {
        "generate": generate,
        "rest": partial(_rest, llm),
        "limits": limits,
        "decode": decode,
        "parts": parts,
        "costs": lambda: asdict(WeightCosts.of(plan)),
        "weights": lambda: {"weight_bytes": plan.weight_bytes},
        "fill_cache": lambda: _take_pages(executor),
    }


def _batch(num_seqs: int, num_tokens: int, context: int, block_size: int) -> Batch:
    """Return a batch with the last `num_tokens` of each context; the cache's contents do not matter."""
    from quire.common.batch import Batch, Draw, DrawnRows, ScheduledSequence

    blocks_per_seq = -(-context // block_size)
    tables = np.random.default_rng(0).permutation(num_seqs * blocks_per_seq).astype(np.int32)
    draw = Draw(0.0, 0, 1.0, b"")
    sequences = tuple(
        ScheduledSequence(i, (5,) * num_tokens, context - num_tokens, (table,), DrawnRows((draw,), 0))
        for i, table in enumerate(tables.reshape(num_seqs, blocks_per_seq))
    )
    return Batch(0, sequences)


def kernel_times(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that the kernels of a step take: matrix products, attention, and all others."""
    from quire import kernels
    from quire.runner import model_runner
    from quire.runner.decode_graphs import DecodeGraphs

    parts = dict.fromkeys(_SMALL_KERNELS, "others_s") | {"paged_attention": "attention_s"}
    parts |= {"matmul": "products_s", "activated_matmul": "products_s"}
    found = dict.fromkeys(parts.values(), 0.0)

    def timing(kernel: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return kernel(*arguments, **named)
            finally:
                found[part] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(DecodeGraphs, "can_replay", lambda *_: False))
        stack.enter_context(patch.object(model_runner, "_RECORDED_WORK", sys.maxsize))
        for name, part in parts.items():
            stack.enter_context(patch.object(kernels, name, timing(getattr(kernels, name), part)))
        step()
    return found


def _rest(llm: Any, num_seqs: int, num_steps: int) -> dict[str, Any]:
    """Time decode steps of streaming requests, as a server runs them, and the part of each outside the model."""
    from quire import SamplingParams, kernels

    engine, replay, in_model = llm.engine, kernels.KernelGraph.replay, [0.0]

    def timed_replay(graph: kernels.KernelGraph) -> None:
        in_model[0] += timed(lambda: replay(graph))

    params = SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, seed=1, max_tokens=None, ignore_eos=True, output_kind="delta"
    )
    ids = [f"rest-{i}" for i in range(num_seqs)]
    for request_id, prompt in zip(ids, random_prompts(num_seqs, 64), strict=True):
        engine.add_request(request_id, prompt, params)
    while engine.stats().num_generated_tokens == 0 or engine.stats().num_waiting:
        engine.step()
    engine.step()  # records the step
    steps = []
    with patch.object(kernels.KernelGraph, "replay", timed_replay):
        for _ in range(num_steps):
            in_model[0] = 0.0
            steps.append((timed(engine.step), in_model[0]))
    for request_id in ids:
        engine.abort_request(request_id)
    return {
        "step_s": statistics.median(step for step, _ in steps),
        "rest_s": statistics.median(step - model for step, model in steps),
    }


def _take_pages(executor: Any) -> dict[str, Any]:
    """Write to the whole KV cache, because reads of memory that was never written all hit one page of zeros."""
    executor.cache_engine.blocks.fill_(1)
    return {}


if __name__ == "__main__":
    serve(load)
