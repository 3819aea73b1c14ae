"""A simulated fleet beside a real one: two engines of one thread each serve a trace, which is then simulated.

Steps cost what `quire bench steps` measures on one such engine; the rows that it printed stay in the folder, and are
measured again if the file is removed.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.dense import VOCAB, ensure_checkpoint
from benchmarks.engines.interleaved import Row, Run
from benchmarks.engines.peers import ROOT

_NUM_ENGINES, _NUM_BLOCKS, _SEED = 2, 512, 1
_PROMPT_LEN, _OUTPUT_LEN = 40, 24
_LOADS = ((120, 1.8), (150, 6.0))
"""(requests, arrivals per second): what the engines keep up with, and more than they can serve at once. Six of 120
are above the 95th percentile."""
_LIMITS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_threads": 1}
_PROMPTS, _DECODES = (8, 16, 32, 36, 64, 68, 96, 128, 256), (1, 2, 4, 8, 16)
"""Tokens of prompts and numbers of sequences whose steps are measured. Where kernels compute 32 rows at once, a step of
a few more tokens takes a quarter longer."""
_BENCH = ["--prompt-lens", *map(str, _PROMPTS), "--num-seqs", *map(str, _DECODES), "--context", "48"]


def fleet(run: Run) -> Iterator[Row]:
    """Measure throughput and percentiles of the time to the first token of both, and how far they differ."""
    from quire.interfaces.simulate.workloads import dataset_trace

    checkpoint, costs = ensure_checkpoint(run.checkpoint), run.folder / "fleet-costs.jsonl"
    if not costs.exists():
        _measure_costs(checkpoint, costs)
    loads = [(8, 4.0)] if run.quick else _LOADS
    traces = [list(dataset_trace(_PROMPT_LEN, _OUTPUT_LEN, _SEED, number, rate)) for number, rate in loads]
    served = asyncio.run(_serve(checkpoint, traces))
    for (number, rate), trace, real in zip(loads, traces, served, strict=True):
        simulated = _simulate(costs, trace)
        ratios = {f"{name}_ratio": round(simulated[name] / real[name], 3) for name in real}
        yield {"requests": number, "requests_per_s": rate, "real": real, "simulated": simulated, **ratios}


def _measure_costs(checkpoint: Path, costs: Path) -> None:
    """Measure one engine while the other one's core computes too, since they share memory and caches."""
    cpus = sorted(os.sched_getaffinity(0))[:_NUM_ENGINES]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _LIMITS.items() if name != "num_threads"]
    flags += ["--max-model-len=2048", f"--num-gpu-blocks-override={_NUM_BLOCKS}", "--model", str(checkpoint)]
    command = [sys.executable, "-m", "quire", "bench"]
    load = ["throughput", "--runs=1000", "--num-prompts=4", f"--input-len={_PROMPT_LEN}", f"--output-len={_OUTPUT_LEN}"]
    beside = [
        subprocess.Popen([*command, *load, *flags, f"--cpu-list={cpu}"], stdout=subprocess.DEVNULL, cwd=ROOT)
        for cpu in cpus[1:]
    ]
    try:
        measured = [*command, "steps", "--json", *flags, f"--cpu-list={cpus[0]}", *_BENCH]
        out = subprocess.run(measured, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    finally:
        for process in beside:
            process.kill()
            process.wait()
    costs.write_text(out)


async def _serve(checkpoint: Path, traces: list[list[Any]]) -> list[dict[str, float]]:
    """Let two engines serve the traces in real time, one after another."""
    from quire import AsyncLLM, EngineArgs

    args = EngineArgs(
        model=str(checkpoint),
        data_parallel_size=_NUM_ENGINES,
        num_gpu_blocks_override=_NUM_BLOCKS,
        max_model_len=2048,
        speculative_config={"method": "off"},
        **_LIMITS,
    )
    llm = await AsyncLLM.from_args(args)
    try:
        warm = traces[0][0].__class__(0.0, 300, 4)
        await _replay(llm, [warm] * 2 * _NUM_ENGINES, 10**6)
        return [await _replay(llm, trace, 1000 * place) for place, trace in enumerate(traces)]
    finally:
        await llm.shutdown()


async def _replay(llm: Any, trace: list[Any], first: int) -> dict[str, float]:
    """Send the requests of a trace at their times; their numbers, and so their prompts, begin at `first`."""
    from quire import SamplingParams

    start_s, first_s, ends_s, num_tokens = time.monotonic(), list[float](), list[float](), 0

    async def ask(number: int, request: Any) -> None:
        nonlocal num_tokens
        await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.monotonic()))
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True, output_kind="delta")
        prompt = {"prompt_token_ids": [token_id % VOCAB for token_id in request.prompt_token_ids(number)]}
        is_first = True
        async for output in llm.generate(prompt, params, request_id=str(number)):
            if is_first:
                first_s.append(time.monotonic() - start_s - request.arrival_s)
            is_first = False
            num_tokens += len(output.outputs[0].token_ids)
        ends_s.append(time.monotonic() - start_s)

    await asyncio.gather(*[ask(number, request) for number, request in enumerate(trace, start=first)])
    return _figures(first_s, num_tokens, max(ends_s))


def _simulate(costs: Path, trace: list[Any]) -> dict[str, float]:
    """Let two simulated engines serve the trace."""
    from quire.config.kv_cache import FullAttentionSpec
    from quire.config.kv_layout import kv_cache_config
    from quire.config.scheduler import SchedulerConfig
    from quire.interfaces.simulate.fleet.costs import read_costs
    from quire.interfaces.simulate.fleet.simulator import FleetSimulator
    from quire.interfaces.simulate.simulator import Simulator

    cache = kv_cache_config([FullAttentionSpec(1, 2, "float32")], 16, num_blocks=_NUM_BLOCKS)
    limits = SchedulerConfig(_LIMITS["max_num_seqs"], _LIMITS["max_num_batched_tokens"])
    simulated = FleetSimulator(partial(Simulator, cache, limits, cost=read_costs(costs)), _NUM_ENGINES)
    record = simulated.run(trace)
    return _figures(record.first_token_s, record.num_output_tokens, simulated.now_s)


def _figures(first_s: Iterable[float], num_tokens: int, seconds: float) -> dict[str, float]:
    ordered = sorted(first_s)
    figures = {f"first_token_p{p}_s": round(ordered[-(-len(ordered) * p // 100) - 1], 4) for p in (50, 75, 90, 95)}
    return {"output_tokens_per_s": round(num_tokens / seconds, 2), **figures}
