"""How speed grows with threads, up to twice as many as the machine has, and what a parallel region costs."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.checkpoints.dense import ensure_checkpoint
from benchmarks.engines.interleaved import Row, Run, case
from benchmarks.engines.peers import ROOT, Quire, num_threads
from benchmarks.engines.session import Session
from benchmarks.markdown import table, title

_WARM_UP_TOKENS = 4
_REGIONS = """
import sys, time
from quire import _native
_native.set_num_threads(int(sys.argv[1]))
times = []
for _ in range(7):
    start = time.perf_counter()
    assert _native.exercise_pool(20_000) == 0
    times.append((time.perf_counter() - start) / 20_000)
print(1e6 * sorted(times)[3])
"""


def thread_counts(most: int) -> list[int]:
    """One, the powers of two and `most`, and twice as many, where threads share a processor."""
    powers = {1 << exponent for exponent in range(most.bit_length())}
    return sorted(powers | {most, 2 * most})


def with_threads(run: Run, precision: str, count: int) -> Quire:
    """This checkout with a number of threads."""
    members = {"name": f"quire-{count}-threads", "arguments": {"num_threads": count}}
    made: type[Quire] = type("QuireThreads", (Quire,), members)
    return made(run.folder, precision)


def scaling(run: Run) -> Iterator[Row]:
    """Measure decoding and a long prompt by number of threads, interleaved, and the parallel regions of each number."""
    checkpoint, counts = ensure_checkpoint(run.checkpoint), thread_counts(num_threads())
    for count in counts:
        yield {"threads": count, "region_us": round(_region_us(count), 2)}
    cases = [case(1, 128, 32), case(8, 128, 32), case(1, 1024, 1)]
    for precision in ("bfloat16", "int8"):
        with ExitStack() as stack:
            sessions = list[Session]()
            for count in counts:
                sessions.append(Session(with_threads(run, precision, count), checkpoint, 2048))
                stack.callback(sessions[-1].close)
            for each in cases:
                for session in sessions:
                    session.call("generate", **each | {"output_len": min(_WARM_UP_TOKENS, each["output_len"])})
                rounds = [[s.call("generate", **each)["elapsed_s"] for s in sessions] for _ in range(run.rounds)]
                for count, times in zip(counts, zip(*rounds, strict=True), strict=True):
                    speedup = statistics.median(first[0] / own for first, own in zip(rounds, times, strict=True))
                    tokens = each["num_prompts"] * each["output_len" if each["output_len"] > 1 else "input_len"]
                    row = {"precision": precision, **each, "threads": count, "speedup": round(speedup, 3)}
                    yield row | {"tokens_per_s": round(tokens / statistics.median(times), 1)}


def _region_us(count: int) -> float:
    environment = os.environ | Quire(Path()).variables()
    command = [sys.executable, "-c", _REGIONS, str(count)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, env=environment).stdout)


def report(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    """Yield the section of the report on threads."""
    yield from title("Threads", "python -m benchmarks scaling")
    yield "Qwen2-0.5B's shape. The last column has twice as many threads as the machine: they share processors, which"
    yield "should cost little. Tokens per second (for a prompt that generates one, of the prompt), and times those of"
    yield "one thread. A region is what each kernel is for the threads: they wake, divide at most 41 empty tasks, and"
    yield "wait for each other.\n"
    regions = {row["threads"]: row["region_us"] for row in rows if "region_us" in row}
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        if "speedup" in row:
            size = f"{row['num_prompts']} x {row['input_len']} / {row['output_len']}"
            value = f"{row['tokens_per_s']} ({row['speedup']:.2f})"
            found.setdefault((row["precision"], size), {})[row["threads"]] = value
    head = ("weights", "prompts x in / out", *(f"{count} thread{'s' * (count > 1)}" for count in regions))
    lines = [(*names, *(values.get(count, "") for count in regions)) for names, values in found.items()]
    yield from table(head, [*lines, ("a region, us", "", *regions.values())])
