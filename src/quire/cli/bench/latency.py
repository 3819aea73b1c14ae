"""Benchmark of latency: the time to the first token, and the time between tokens.

Requests arrive at random at a given rate, whether or not the engine keeps up; or a fixed number of them always runs.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from quire.cli.bench.limits import Limits, significant
from quire.cli.bench.throughput import acceptance, draws_of, load_for_bench, random_prompts, run_once
from quire.common.params import SamplingParams
from quire.common.progress import progress
from quire.engine.llm_engine import LLMEngine
from quire.interfaces.simulate.report import percentiles


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row. Tokens of one step count as one interval between tokens, as vLLM's inter-token latency does; its
    time per output token, which is `per_token_ms`, is a request's time after the first token divided by the other
    tokens. `of_limit` is the time to read all weights once, divided by the median interval."""
    params, llm = draws_of(options), load_for_bench(options)
    config = llm.engine.model_config
    prompts = random_prompts(options.num_prompts, options.input_len, config.vocab_size)
    run_once(llm, prompts[:1], params, "warm-up")  # warms up
    before = llm.engine.stats()
    with progress("latency", len(prompts), "request") as advance:
        times = token_times(llm.engine, prompts, params, options.concurrency, options.request_rate, advance)
    read_s = llm.engine.plan.weight_bytes / Limits.measure(config.dtype).read_bytes_per_s
    between = [later - earlier for tokens in times for earlier, later in pairwise(tokens[1:])]
    num_later = options.output_len - 1
    per_token = [(tokens[-1] - tokens[1]) / num_later for tokens in times if num_later]
    yield {
        "model": config.model,
        **{name: getattr(options, name) for name in ("num_prompts", "input_len", "output_len", "request_rate")},
        "concurrency": None if options.request_rate else options.concurrency,
        "first_token_ms": percentiles_ms([tokens[1] - tokens[0] for tokens in times]),
        "between_tokens_ms": percentiles_ms(between) or None,
        "per_token_ms": percentiles_ms(per_token) or None,
        "of_limit": significant(read_s * 1e3 / percentiles_ms(between)["p50"]) if between else None,
        **acceptance(before, llm.engine.stats()),
    }


def token_times(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    request_rate: float = 0.0,
    advance: Callable[[int], object] = lambda _: None,
) -> list[list[float]]:
    """Return, for each request, the time of its arrival followed by the time of each of its tokens."""
    clock, rng, times, num_unfinished = time.monotonic, random.Random(0), list[list[float]](), 0
    due = clock()
    while len(times) < len(prompts) or num_unfinished:
        while len(times) < len(prompts) and (due <= clock() if request_rate else num_unfinished < concurrency):
            arrival = due if request_rate else clock()
            prompt = {"prompt_token_ids": prompts[len(times)]}
            engine.add_request(str(len(times)), prompt, params, arrival_time=arrival)
            times.append([arrival])
            due, num_unfinished = due + rng.expovariate(request_rate or 1.0), num_unfinished + 1
        if not num_unfinished:
            time.sleep(max(0.0, due - clock()))
        for output in engine.step():
            times[int(output.request_id)].append(clock())
            num_unfinished -= output.finished
            advance(output.finished)
    return times


def percentiles_ms(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles 50, 90 and 99 of seconds, in milliseconds, as `percentiles` does."""
    return percentiles([value * 1e3 for value in values], digits=3)
