"""Ask ten times as much as can be served, and see that what is admitted is served as if nothing were.

    python -m reliability.overload [MODEL] [--factor 10] [--seconds 20] [--seqs 8] [--output-len 256] [--record]

`quire serve` with a short queue, and open-loop arrivals (Poisson) of streams. Measured in turn: the peak, by as many
clients as run at once; half of its rate; ten times its rate; and a polite tenant, one request after the other, beside
one that floods. Aims: refused within 100 ms (p99), gaps between an admitted stream's tokens at p99 at most twice
those at half the rate, throughput within 5 % of the peak, memory flat, the polite tenant never refused. Prints one JSON
line; exit status 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from reliability.page import record, table
from reliability.served import Exchange, Held, Served, post

MAX_REFUSAL_S = 0.1
MAX_GAP_RATIO = 2.0
MIN_OF_PEAK = 0.95
MAX_GROWTH_BYTES = 50 * 10**6
_KEYS = {"flood": "sk-flood", "polite": "sk-polite"}


@dataclass(frozen=True)
class Load:
    """What came of a time of arrivals."""

    exchanges: list[Exchange]
    began_s: float
    seconds: float

    @property
    def admitted(self) -> list[Exchange]:
        """That got a stream."""
        return [each for each in self.exchanges if each.status == 200]

    @property
    def refused_s(self) -> list[float]:
        """How long each refusal took."""
        return [each.answered_s or 0.0 for each in self.exchanges if each.status == 429]

    @property
    def gaps_s(self) -> list[float]:
        """Between the tokens of a stream, of all streams."""
        pairs = (itertools.pairwise(each.event_times) for each in self.admitted)
        return [later - earlier for some in pairs for earlier, later in some]

    @property
    def tokens_per_s(self) -> float:
        """While requests arrived, its first fifth left out, in which places fill."""
        start_s, end_s = self.began_s + self.seconds / 5, self.began_s + self.seconds
        times = (moment for each in self.admitted for moment in each.event_times)
        return sum(start_s <= moment < end_s for moment in times) / (end_s - start_s)

    def row(self, name: str) -> dict[str, Any]:
        """For the table."""
        statuses = [each.status for each in self.exchanges]
        return {
            "load": name,
            "requests": len(statuses),
            "admitted": statuses.count(200),
            "refused (429)": statuses.count(429),
            "other": len(statuses) - statuses.count(200) - statuses.count(429),
            "tokens/s": round(self.tokens_per_s, 1),
            "gap p50 ms": _ms(self.gaps_s, 50),
            "gap p99 ms": _ms(self.gaps_s, 99),
            "refusal p99 ms": _ms(self.refused_s, 99),
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """0 of none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _ms(values: Sequence[float], percent: int) -> float:
    return round(percentile(values, percent) * 1e3, 2)


class Asker:
    """Asks for streams of equal length, each with a prompt of its own."""

    def __init__(self, port: int, output_len: int) -> None:
        self._port = port
        self._output_len = output_len
        self._numbers = itertools.count()

    async def ask(self, tenant: str) -> Exchange:
        """One stream to its end."""
        asked = {"prompt": f"{next(self._numbers)} is what this begins with", "max_tokens": self._output_len}
        told = {"stream": True, "return_token_ids": True}  # each token is told, also one that is no text yet
        body = json.dumps(asked | told | {"temperature": 0, "ignore_eos": True}).encode()
        return await post(self._port, "/v1/completions", body, authorization=f"Bearer {_KEYS[tenant]}")

    async def closed(self, tenant: str, num_clients: int, seconds: float) -> Load:
        """So many clients, each with one request after the other."""
        began_s, made = time.perf_counter(), list[Exchange]()

        async def client() -> None:
            while time.perf_counter() < began_s + seconds:
                made.append(await self.ask(tenant))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return Load(made, began_s, seconds)

    async def open(self, tenant: str, per_s: float, seconds: float) -> Load:
        """Arrivals at this rate, whatever becomes of those before."""
        rng, began_s, tasks = random.Random(7), time.perf_counter(), list[asyncio.Task[Exchange]]()
        due_s = began_s
        while (due_s := due_s + rng.expovariate(per_s)) < began_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(tenant)))
        return Load(list(await asyncio.gather(*tasks)), began_s, seconds)


async def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    """All loads in turn, and what is to be said of them."""
    asker, seconds = Asker(served.port, options.output_len), options.seconds
    await asker.closed("flood", options.seqs, min(5.0, seconds))  # warm up
    peak = await asker.closed("flood", options.seqs, seconds)
    per_s = peak.tokens_per_s / options.output_len
    half = await asker.open("flood", per_s / 2, seconds)
    before = Held.by(served.pid)
    over = await asker.open("flood", options.factor * per_s, seconds)
    grown_bytes = Held.by(served.pid).memory_bytes - before.memory_bytes
    polite_alone = await asker.closed("polite", 1, seconds / 2)
    flood, polite = await asyncio.gather(
        asker.open("flood", options.factor * per_s, seconds), asker.closed("polite", 1, seconds)
    )
    loads = {
        "peak: as many clients as run at once": peak,
        "half the rate": half,
        f"{options.factor:g} times the rate": over,
        "polite tenant alone": polite_alone,
        "polite tenant beside the flood": polite,
        "the flood": flood,
    }
    found = {
        "refusal_p99_s": percentile(over.refused_s, 99),
        "gap_p99_ratio": percentile(over.gaps_s, 99) / percentile(half.gaps_s, 99),
        "of_peak": over.tokens_per_s / peak.tokens_per_s,
        "grown_mb": grown_bytes / 1e6,
        "polite_refused": float(len(polite.exchanges) - len(polite.admitted)),
    }
    aims = {
        "refusal_p99_s": found["refusal_p99_s"] <= MAX_REFUSAL_S and bool(over.refused_s),
        "gap_p99_ratio": found["gap_p99_ratio"] <= MAX_GAP_RATIO,
        "of_peak": found["of_peak"] >= MIN_OF_PEAK,
        "grown_mb": grown_bytes <= MAX_GROWTH_BYTES,
        "polite_refused": found["polite_refused"] == 0,
    }
    return {
        "tool": "overload", "model": Path(options.model or "quire-tiny").name, "factor": options.factor,
        "num_threads": options.num_threads, "seqs": options.seqs, "output_len": options.output_len,
        "requests_per_s": round(per_s, 2),
        "loads": [load.row(name) for name, load in loads.items()],
        "polite_stream_s": [round(_median_s(load), 3) for load in (polite_alone, polite)],
        "found": {name: round(value, 4) for name, value in found.items()}, "met": aims,
    }  # fmt: skip


def _median_s(load: Load) -> float:
    return statistics.median(each.event_times[-1] - each.began_s for each in load.admitted)


def flags(options: argparse.Namespace) -> list[str]:
    """Of a server whose queue is as long as what runs at once, and of which one tenant has no more than that."""
    model = [] if options.model is None else [f"--model={options.model}"]
    threads = [] if options.num_threads is None else [f"--num-threads={options.num_threads}"]
    return [
        *model, *threads,
        f"--max-num-seqs={options.seqs}", f"--max-waiting={options.seqs}", "--max-model-len=1024",
        f"--max-concurrent-per-tenant={2 * options.seqs - 2}", "--scheduling-policy=fair", "--no-log-requests",
    ]  # fmt: skip


def main() -> int:
    """Run and print; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--num-threads", type=int, help="of the engine; one less than there are leaves the server one")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
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
        said = [f"{name}: {value:g}, {'met' if row['met'][name] else 'MISSED'}" for name, value in row["found"].items()]
        command = f"make overload ARGS='{' '.join(sys.argv[1:])}'"
        record("overload", command, [*table(row["loads"]), "", "; ".join(said) + "."])
    return 0 if all(row["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
