"""Send ten times as many requests as can be served, and check that admitted requests are served as usual.

    python -m reliability.overload [MODEL] [--factor 10] [--seconds 10] [--rounds 4] [--seqs 8] [--output-len 256]

`quire serve` runs with a short queue, and streams arrive at random (Poisson), whether or not earlier ones have ended.
Three loads are measured interleaved in several rounds, because machines change from minute to minute: the peak, with as
many clients as sequences run at once; half of the peak's rate; ten times its rate. Then a polite tenant sends one
request after another, alone and beside a tenant that floods the server. The aims: rejections within 100 ms (p99); gaps
between the tokens of admitted streams at most twice (p99) those at half the rate; throughput within 5 % of the peak
(median of the rounds); no growth of the memory of both processes; no rejection of the polite tenant. Prints one line of
JSON; the exit status is 1 if an aim is missed. `--record` writes the result to docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from reliability.page import record, table
from reliability.served import Exchange, Resources, Served, busy_s, post

MAX_REFUSAL_S = 0.1
MAX_GAP_RATIO = 2.0
MIN_OF_PEAK = 0.95
MAX_GROWN_MB = 50
_KEYS = {"flood": "sk-flood", "polite": "sk-polite"}


@dataclass(frozen=True)
class Load:
    """The results of one load."""

    exchanges: list[Exchange]
    began_s: float
    seconds: float
    output_len: int
    resources: Mapping[str, Resources]
    """Resources of each process when the last request arrived."""
    cores: Mapping[str, float]
    """Number of cores that each process, and all other processes of the machine, kept busy."""

    @property
    def admitted(self) -> list[Exchange]:
        """Exchanges with a complete stream."""
        return [each for each in self.exchanges if each.status == 200 and each.ended]

    @property
    def refused_s(self) -> list[float]:
        """Seconds that each rejection took."""
        return [each.answered_s or 0.0 for each in self.exchanges if each.status == 429]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive events of all streams. An event has one token, or several that came together."""
        pairs = (itertools.pairwise(each.event_times) for each in self.admitted)
        return [later - earlier for some in pairs for earlier, later in some]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second while requests arrived, without the first fifth of that time, when the batch fills."""
        start_s, end_s = self.began_s + self.seconds / 5, self.began_s + self.seconds
        shares = (
            sum(start_s <= moment < end_s for moment in each.event_times) / len(each.event_times)
            for each in self.admitted
        )
        return self.output_len * sum(shares) / (end_s - start_s)

    def row(self, name: str) -> dict[str, Any]:
        """Return the load's row of the table."""
        num_admitted, num_refused = len(self.admitted), len(self.refused_s)
        return {
            "load": name,
            "requests": len(self.exchanges),
            "admitted": num_admitted,
            "refused (429)": num_refused,
            "other": len(self.exchanges) - num_admitted - num_refused,
            "tokens/s": round(self.tokens_per_s, 1),
            "gap p50 ms": _ms(self.gaps_s, 50),
            "gap p99 ms": _ms(self.gaps_s, 99),
            "refusal p99 ms": _ms(self.refused_s, 99),
            **{f"cores: {process}": round(cores, 2) for process, cores in self.cores.items()},
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of the values; 0 if there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _ms(values: Sequence[float], percent: int) -> float:
    return round(percentile(values, percent) * 1e3, 2)


class Asker:
    """Requests streams of equal length with different prompts, and measures the processes meanwhile."""

    def __init__(self, served: Served, output_len: int) -> None:
        assert served.engine_pid is not None
        self._port = served.port
        self._pids = {"engine": served.engine_pid, "API": served.pid, "clients": os.getpid()}
        self._output_len = output_len
        self._numbers = itertools.count()

    async def ask(self, tenant: str) -> Exchange:
        """Request one stream and read it to its end."""
        asked = {"prompt": f"{next(self._numbers)} is what this begins with", "max_tokens": self._output_len}
        form = {"stream": True, "return_token_ids": True}  # so every token gives an event, also one without text
        body = json.dumps(asked | form | {"temperature": 0, "ignore_eos": True}).encode()
        return await post(self._port, "/v1/completions", body, authorization=f"Bearer {_KEYS[tenant]}")

    async def closed(self, tenant: str, num_clients: int, seconds: float) -> Load:
        """Run a number of clients that each send one request after another."""
        began_s = time.perf_counter()

        async def client() -> list[Exchange]:
            made = []
            while time.perf_counter() < began_s + seconds:
                made.append(await self.ask(tenant))
            return made

        clients = [asyncio.create_task(client()) for _ in range(num_clients)]
        watch = asyncio.create_task(self._watch(seconds))
        made = [exchange for some in await asyncio.gather(*clients) for exchange in some]
        return Load(made, began_s, seconds, self._output_len, *await watch)

    async def open(self, tenant: str, per_s: float, seconds: float) -> Load:
        """Send requests at this rate, whether or not earlier ones have ended."""
        rng, began_s, tasks = random.Random(7), time.perf_counter(), list[asyncio.Task[Exchange]]()
        watch, due_s = asyncio.create_task(self._watch(seconds)), began_s
        while (due_s := due_s + rng.expovariate(per_s)) < began_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(tenant)))
        exchanges = list(await asyncio.gather(*tasks))
        return Load(exchanges, began_s, seconds, self._output_len, *await watch)

    async def _watch(self, seconds: float) -> tuple[dict[str, Resources], dict[str, float]]:
        """Wait, then return the resources of each process and the number of cores that each kept busy."""
        began_s, before = time.perf_counter(), self._busy_s()
        await asyncio.sleep(seconds)
        passed_s, after = time.perf_counter() - began_s, self._busy_s()
        cores = {name: (after[name] - before[name]) / passed_s for name in after}
        cores["others"] = max(0.0, cores.pop("all") - sum(cores.values()))
        return {name: Resources.of(pid) for name, pid in self._pids.items()}, cores

    def _busy_s(self) -> dict[str, float]:
        return {name: busy_s(pid) for name, pid in self._pids.items()} | {"all": busy_s()}


async def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all loads, and return the results with the aims that were met."""
    asker, seconds = Asker(served, options.output_len), options.seconds
    await asker.closed("flood", options.seqs, min(5.0, seconds))  # warm up
    peaks, halves, overs = list[Load](), list[Load](), list[Load]()
    for _ in range(options.rounds):
        peaks.append(await asker.closed("flood", options.seqs, seconds))
        per_s = peaks[-1].tokens_per_s / options.output_len
        halves.append(await asker.open("flood", per_s / 2, seconds))
        overs.append(await asker.open("flood", options.factor * per_s, seconds))
    polite_alone = await asker.closed("polite", 1, seconds / 2)
    flood, polite = await asyncio.gather(
        asker.open("flood", options.factor * per_s, seconds), asker.closed("polite", 1, seconds)
    )
    rounds = {
        "peak: as many clients as run at once": peaks,
        "half the rate": halves,
        f"{options.factor:g} times the rate": overs,
    }
    loads = [
        (name, load) for turn in zip(*rounds.values(), strict=True) for name, load in zip(rounds, turn, strict=True)
    ]
    loads += [("polite tenant alone", polite_alone), ("polite tenant beside the flood", polite), ("the flood", flood)]
    turns = list(zip(overs, peaks, strict=True))
    refused_s = [wait_s for over in overs for wait_s in over.refused_s]
    found = {
        "refusal_p99_s": percentile(refused_s, 99),
        "gap_p99_ratio": _gap_p99_s(overs) / _gap_p99_s(halves),
        "of_peak": statistics.median(over.tokens_per_s / peak.tokens_per_s for over, peak in turns),
        "api_grown_mb": _grown_mb("API", halves[0], overs[-1]),
        "engine_grown_mb": _grown_mb("engine", halves[0], overs[-1]),
        "polite_refused": float(len(polite.exchanges) - len(polite.admitted)),
    }
    aims = {
        "refusal_p99_s": found["refusal_p99_s"] <= MAX_REFUSAL_S and bool(refused_s),
        "gap_p99_ratio": found["gap_p99_ratio"] <= MAX_GAP_RATIO,
        "of_peak": found["of_peak"] >= MIN_OF_PEAK,
        "api_grown_mb": found["api_grown_mb"] <= MAX_GROWN_MB,
        "engine_grown_mb": found["engine_grown_mb"] <= MAX_GROWN_MB,
        "polite_refused": found["polite_refused"] == 0,
    }
    return {
        "tool": "overload", "model": Path(options.model or "quire-tiny").name, "factor": options.factor,
        "num_threads": options.num_threads, "seqs": options.seqs, "output_len": options.output_len,
        "requests_per_s": round(per_s, 2),
        "loads": [load.row(name) for name, load in loads],
        "polite_stream_s": [round(_median_s(load), 3) for load in (polite_alone, polite)],
        "found": {name: round(value, 4) for name, value in found.items()}, "met": aims,
    }  # fmt: skip


def _gap_p99_s(loads: Iterable[Load]) -> float:
    return percentile([gap_s for load in loads for gap_s in load.gaps_s], 99)


def _grown_mb(process: str, before: Load, after: Load) -> float:
    return (after.resources[process].memory_bytes - before.resources[process].memory_bytes) / 1e6


def _median_s(load: Load) -> float:
    return statistics.median(each.event_times[-1] - each.began_s for each in load.admitted)


def flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of a server with a short queue and a limit for each tenant."""
    model = [] if options.model is None else [f"--model={options.model}"]
    threads = [] if options.num_threads is None else [f"--num-threads={options.num_threads}"]
    return [
        *model, *threads,
        f"--max-num-seqs={options.seqs}", f"--max-waiting={options.seqs}", "--max-model-len=1024",
        f"--max-concurrent-per-tenant={2 * options.seqs - 2}", "--scheduling-policy=fair", "--no-log-requests",
    ]  # fmt: skip


def summary(row: Mapping[str, Any]) -> list[str]:
    """Return the result as lines of Markdown."""
    threads = "as many threads as cores" if row["num_threads"] is None else f"{row['num_threads']} thread(s)"
    alone_s, beside_s = row["polite_stream_s"]
    aims = [f"{name}: {value:g}, {'met' if row['met'][name] else 'MISSED'}" for name, value in row["found"].items()]
    return [
        f"{row['model']}, {row['seqs']} concurrent streams of {row['output_len']} tokens, engine with {threads}:", "",
        *table(row["loads"]), "",
        f"A stream of the polite tenant takes {alone_s:g} s alone and {beside_s:g} s beside the flood.", "",
        "; ".join(aims) + ".",
    ]  # fmt: skip


def main() -> int:
    """Run the loads and print the result; the exit status is 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=10, help="seconds of each load")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--num-threads", type=int, help="threads of the engine (default for the embedded model: 1)")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    if options.model is None and options.num_threads is None:
        options.num_threads = 1  # with two threads, one would often wait for the core that the API process uses
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{name}:{key}\n" for name, key in _KEYS.items()))
        served = Served([*flags(options), f"--api-key-file={keys}"], Path(folder) / "serve.log")
        try:
            row = uvloop.run(measure(served, options))
        finally:
            served.close()
    print(json.dumps(row))
    if options.record:
        arguments = [row["model"] if each == options.model else each for each in sys.argv[1:]]
        section = "overload" if options.model is None else "overload of a checkpoint"
        record(section, f"make overload ARGS='{' '.join(arguments)}'", summary(row))
    return 0 if all(row["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
