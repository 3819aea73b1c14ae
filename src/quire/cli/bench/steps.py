"""Benchmark of single steps, of prompts and of decodes: the costs from which `quire simulate` and `quire plan --fleet`
compute how long an engine's steps take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.cli.bench.throughput import greedy, load_for_bench, random_prompts
from quire.common.errors import RequestError
from quire.common.progress import tracked

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

_ROUNDS = 3
_NUM_DECODES = 8
_NUM_PROMPTS = 4
"""Prompts that together have the tokens of one: the same work, except in attention."""


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for a prompt of each length, for several prompts of as many tokens, and for each number of sequences
    at each length of context. Times are those of whole steps of the engine: the median of several rounds through all
    rows, after one that warms up, so that a disturbance of some seconds does not decide any row."""
    degree = getattr(options, "tensor_parallel_size", None) or 1
    llm = load_for_bench(options)
    engine, scheduler = llm.engine, llm.engine.plan.config.scheduler
    config = llm.engine.model_config
    most = min(scheduler.max_num_batched_tokens, config.max_model_len - 1)
    prompts = [
        ("prefill", num_seqs, length, 0)
        for length in options.prompt_lens
        for num_seqs in (1, _NUM_PROMPTS)
        if length <= most and not length % num_seqs and num_seqs <= scheduler.max_num_seqs
    ]
    decodes = [("decode", seqs, seqs, c) for c in options.context for seqs in options.num_seqs]
    decodes = [row for row in decodes if row[1] <= scheduler.max_num_seqs and row[3] + _NUM_DECODES + 2 <= most]
    if not prompts or not decodes:
        raise RequestError(
            f"no step fits: a step has at most {most} tokens of a prompt, {scheduler.max_num_seqs} sequences"
        )
    rows, times = [*prompts, *decodes], defaultdict[tuple[str, int, int, int], list[float]](list)
    for number, (kind, num_seqs, num_tokens, context) in enumerate(tracked(rows * (1 + _ROUNDS), "steps")):
        if kind == "prefill":
            found = _step_times(engine, num_seqs, num_tokens // num_seqs, 1)[:1]
        else:
            found = _step_times(engine, num_seqs, context, 2 + _NUM_DECODES)[-_NUM_DECODES:]
        times[kind, num_seqs, num_tokens, context] += found if number >= len(rows) else []
    for (kind, num_seqs, num_tokens, context), found in times.items():
        yield {
            "model": config.model,
            "dtype": config.dtype,
            "quantization": config.quantization or "none",
            "num_threads": llm.engine.plan.config.parallel.num_threads,
            "tensor_parallel_size": degree,
            "kind": kind,
            "num_seqs": num_seqs,
            "num_tokens": num_tokens,
            "context": context,
            "step_ms": round(statistics.median(found) * 1e3, 4),
        }


def _step_times(engine: LLMEngine, num_seqs: int, prompt_len: int, output_len: int) -> list[float]:
    """Return the seconds of each step in which equal prompts run to their end."""
    for number, prompt in enumerate(random_prompts(num_seqs, prompt_len, engine.model_config.vocab_size)):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy(output_len))
    times, num_finished = list[float](), 0
    while num_finished < num_seqs:
        start = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - start)
        num_finished += sum([output.finished for output in outputs])
    return times
