"""Benchmark of throughput: tokens per second of prompts that all start together.

The first run warms up, so the last run is reported. `fraction_of_limit` is the least time this machine could take
(`WeightCosts.generation_s` says what it counts), divided by the time taken. It is null without native kernels.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from quire import kernels
from quire.cli.arguments.options import load_llm
from quire.cli.bench.limits import Limits, WeightCosts, significant
from quire.common.errors import RequestError
from quire.common.params import SamplingParams

if TYPE_CHECKING:
    from quire.common.outputs import EngineStats
    from quire.interfaces.llm import LLM

_SEED = 0
_FIRST_TOKEN_ID = 3
"""Lower ids are special tokens in most vocabularies."""


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Load the model, run the batch, and yield the last run's row; print every run unless only JSON is wanted."""
    params, start = draws_of(options), time.perf_counter()
    llm = load_for_bench(options)
    load_s = time.perf_counter() - start
    prompts = random_prompts(options.num_prompts, options.input_len, llm.engine.model_config.vocab_size)
    result: dict[str, Any] = {}
    for i in range(options.runs):
        before = llm.engine.stats()
        elapsed_s = run_once(llm, prompts, params, str(i), use_tqdm=True)
        result = _result(options, llm, elapsed_s, load_s)
        result |= acceptance(before, llm.engine.stats())
        if not options.json:
            print(
                f"run {i + 1}: {result['elapsed_s']:.3f} s, {result['output_tokens_per_s']:.1f} output tokens/s, "
                f"{result['total_tokens_per_s']:.1f} total tokens/s",
                flush=True,
            )
    if not options.json and result["drafted_tokens"]:
        print(
            f"drafts: {result['accepted_tokens']} of {result['drafted_tokens']} accepted, "
            f"mean acceptance length {result['mean_acceptance_length']}"
        )
    result |= _limit(options, llm, result["elapsed_s"])  # last, because measuring raises the peak of memory
    if not options.json and result["fraction_of_limit"] is not None:
        print(
            f"limit of this machine: {result['limit_s']:.3f} s, at {result['read_gb_per_s']:.1f} GB/s and "
            f"{result['gflop_per_s']:.0f} GFLOP/s; fraction of the limit reached: {result['fraction_of_limit']:.2f}"
        )
    yield result


def load_for_bench(options: argparse.Namespace) -> LLM:
    """Load the model without what would spare it work that it did in an earlier run."""
    options.enable_prefix_caching = False
    options.speculative_config = getattr(options, "speculative_config", None) or {"method": "off"}
    return load_llm(options)


def acceptance(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Return how many drafts were verified and accepted between two moments, and the mean number of tokens that a
    verification of drafts gave, which vLLM calls the mean acceptance length."""
    num_drafts, num_tokens, num_accepted = (
        sum(getattr(each, name) * sign for stats, sign in ((after, 1), (before, -1)) for each in stats.drafts.values())
        for name in ("num_drafts", "num_tokens", "num_accepted")
    )
    length = round(1 + num_accepted / num_drafts, 2) if num_drafts else None
    return {"drafted_tokens": num_tokens, "accepted_tokens": num_accepted, "mean_acceptance_length": length}


def random_prompts(num_prompts: int, input_len: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random token ids, the same at every call."""
    generator = random.Random(_SEED)
    first = min(_FIRST_TOKEN_ID, vocab_size - 1)
    return [[generator.randrange(first, vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]


def greedy(output_len: int) -> SamplingParams:
    """Return parameters that generate exactly `output_len` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def draws_of(options: argparse.Namespace) -> SamplingParams:
    """Return the parameters that the options ask for."""
    how = {"temperature": options.temperature, "top_p": options.top_p}
    return SamplingParams(**how, max_tokens=options.output_len, ignore_eos=True)


def run_once(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str = "", *, use_tqdm: bool = False
) -> float:
    """Return the seconds that one batch takes. Raises RequestError if a prompt was rejected or an output cut short.

    Batches of another `salt` draft nothing from what this one generates.
    """
    start = time.perf_counter()
    salted = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
    outputs = llm.generate(salted, params, use_tqdm=use_tqdm)
    elapsed_s = time.perf_counter() - start
    for output in outputs:
        if len(output.outputs[0].token_ids) != params.max_tokens:
            raise RequestError(
                output.error
                or f"an output has {len(output.outputs[0].token_ids)} tokens instead of {params.max_tokens}: the "
                "model's context is too short"
            )
    return elapsed_s


def _result(options: argparse.Namespace, llm: LLM, elapsed_s: float, load_s: float) -> dict[str, Any]:
    num_output_tokens = options.num_prompts * options.output_len
    num_tokens = num_output_tokens + options.num_prompts * options.input_len
    config = llm.engine.model_config
    return {
        "engine": "quire",
        "model": PurePath(config.model).name,
        "dtype": config.dtype,
        "num_prompts": options.num_prompts,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "elapsed_s": round(elapsed_s, 4),
        "output_tokens_per_s": round(num_output_tokens / elapsed_s, 2),
        "total_tokens_per_s": round(num_tokens / elapsed_s, 2),
        "load_s": round(load_s, 3),
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def _limit(options: argparse.Namespace, llm: LLM, elapsed_s: float) -> dict[str, float | None]:
    if kernels.isa() == "reference":
        return dict.fromkeys(("limit_s", "read_gb_per_s", "gflop_per_s", "fraction_of_limit"))
    plan, config = llm.engine.plan, llm.engine.model_config
    parallel = plan.config.parallel
    with kernels.backend_for("cpu").threads(parallel.num_threads, parallel.cpus):
        # of another tool's weights, those of the dtype of the computation
        limits = Limits.measure(next((f for f in kernels.QUANTIZED_FORMATS if f == config.quantization), config.dtype))
    limit_s = WeightCosts.of(plan).generation_s(
        limits,
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        max_num_batched_tokens=plan.config.scheduler.max_num_batched_tokens,
    )
    return {
        "limit_s": round(limit_s, 4),
        "read_gb_per_s": round(limits.read_bytes_per_s / 1e9, 1),
        "gflop_per_s": round(limits.flops_per_s / 1e9, 1),
        "fraction_of_limit": significant(limit_s / elapsed_s),
    }


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
