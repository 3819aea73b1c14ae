"""Compare ranks of one thread each with one process of as many threads, and measure what putting parts together costs.

    python -m tools.bench_ranks MODEL [--quantization int8] [--prompts 1 8 32] [--ranks 2] [--steps 24] [--experts]
    python -m tools.bench_ranks --gathers

Both engines are alive and take turns of some steps. The first one of a turn does not count, since threads of the other
engine still spin then (ADR 0098). Prints one line of JSON per number of prompts: the quarter of the fastest decode
steps of each, and the ratio of their speeds, above 1 where ranks are faster; and one for a prefill of 1,024 tokens.
With --experts, the one engine divides each expert among its ranks, and the other one has whole experts in each.
With --gathers, the time of a gather by the bytes that a rank adds: in shared memory, over a connection, and with gloo.
"""

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from quire import LLM, SamplingParams, kernels
from quire.config.parallel import Shard

CPUS = sorted(os.sched_getaffinity(0))
SLOT_BYTES, WIDTH = 512 * 1024, 256
TURN = 6
"""Steps of an engine before the other one's."""


def quarter(times: list[float]) -> float:
    """The slowest of the quarter of the fastest."""
    return sorted(times)[len(times) // 4]


class Decoding:
    """Requests that decode in one engine, step by step."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.times: list[float] = []
        self.prefills: list[float] = []

    def begin(self, num_prompts: int, num_tokens: int) -> None:
        """Compute prompts of 32 tokens, so that only decode steps are left."""
        params = SamplingParams(max_tokens=num_tokens + 4, temperature=0, ignore_eos=True, detokenize=False)
        for i in range(num_prompts):
            self.engine.add_request(str(i), {"prompt_token_ids": [100 + i] * 32}, params)
        for _ in range(3):
            self.engine.step()

    def turn(self) -> None:
        """Run some steps and keep the times of all but the first one."""
        self.engine.step()
        for _ in range(TURN - 1):
            start = time.perf_counter()
            self.engine.step()
            self.times.append(time.perf_counter() - start)

    def prefill(self, number: int) -> None:
        """Run a prompt of 1,024 tokens that is not cached."""
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        prompt = [1000 + number] + [7 * i % 900 + 3 for i in range(1023)]
        self.engine.add_request("prefill", {"prompt_token_ids": prompt}, params)
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.prefills.append(time.perf_counter() - start)

    def end(self) -> float:
        """Abort what runs, and return the time of a step."""
        while self.engine.has_unfinished_requests():
            for request_id in map(str, range(256)):
                self.engine.abort_request(request_id)
        times, self.times = self.times, []
        return quarter(times)


def compare(args: argparse.Namespace) -> None:
    """Print a line for each number of prompts, and for the prefill."""
    given: dict[str, Any] = {"quantization": args.quantization, "max_model_len": 1100, "kv_cache_memory": "256MiB"}
    given |= {"speculative_config": {"method": "off"}, "max_num_batched_tokens": 1024}
    of_ranks = {"tensor_parallel_size": args.ranks, "cpu_list": ",".join(map(str, CPUS[: args.ranks]))}
    first = of_ranks if args.experts else {"num_threads": args.ranks}
    one = Decoding(LLM(args.model, **first, **given))
    ranks = Decoding(LLM(args.model, **of_ranks, enable_expert_parallel=args.experts, **given))
    for num_prompts in args.prompts:
        for each in (one, ranks):
            each.begin(num_prompts, args.steps + TURN)
        for _ in range(-(-args.steps // TURN)):
            one.turn()
            ranks.turn()
        report(args, {"prompts": num_prompts}, one.end(), ranks.end())
    for number in range(4):
        one.prefill(number)
        ranks.prefill(number)
    report(args, {"prefill": 1024}, min(one.prefills), min(ranks.prefills))


def report(args: argparse.Namespace, what: dict[str, int], one_s: float, ranks_s: float) -> None:
    """Print a line."""
    row = {"quantization": args.quantization, "ranks": args.ranks, **what}
    row |= {"one_ms": round(1e3 * one_s, 2), "ranks_ms": round(1e3 * ranks_s, 2), "ratio": round(one_s / ranks_s, 3)}
    print(json.dumps(row), flush=True)


def gathers() -> None:
    """Print the time of a gather of two ranks, by the bytes that each adds: in shared memory and over a connection,
    both recorded, and with gloo. The ranks are pinned threads; connections are those of the loopback device."""
    for num_bytes in (1024, 4096, 16384, 65536, 262144, 1048576):
        row = {"bytes": num_bytes}
        for name, make in (("shared", shared), ("connection", connected), ("gloo", gloo)):
            row[f"{name}_us"] = round(1e6 * time_of(make(num_bytes)), 2)  # type: ignore[assignment]
        print(json.dumps(row), flush=True)


def time_of(make: Callable[[int], Callable[[], object]]) -> float:
    """The time of one of the 100 gathers that `make` returns for a rank, in both ranks at once."""
    times, barrier = list[float](), threading.Barrier(2)

    def run(rank: int) -> None:
        os.sched_setaffinity(0, {CPUS[rank]})  # of this thread alone
        gather_100_times = make(rank)
        barrier.wait()
        for _ in range(20):
            start = time.perf_counter()
            gather_100_times()
            times.append((time.perf_counter() - start) / 100)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return quarter(times)


def shared(num_bytes: int, wires: Sequence[socket.socket] = ()) -> Callable[[int], Callable[[], object]]:
    """Gathers of two ranks of one machine; with `wires`, which are kept, of one rank on each of two."""
    files = [os.memfd_create("ranks") for _ in range(len(wires) or 1)]
    for file in files:
        os.ftruncate(file, kernels.rank_memory_bytes(2, SLOT_BYTES))

    def make(rank: int) -> Callable[[], object]:
        given: dict[str, Any] = {"own": (rank, rank + 1), "sockets": [wires[rank].fileno()]} if wires else {}
        ranks = kernels.Ranks.join(Shard(rank, 2), files[rank % len(files)], SLOT_BYTES, **given)
        gather, x = kernels.Gather(ranks, [WIDTH, WIDTH]), torch.zeros(num_bytes // (4 * WIDTH), WIDTH)
        backend = kernels.backend_for("cpu")
        graph, workspace = backend.graph(), backend.workspace()
        with workspace.recording(), graph.record():
            for _ in range(100):
                gather(x)

        def replay(*_: object, kept: object = (workspace, ranks, gather, x, wires)) -> None:
            graph.replay()

        return replay

    return make


def connected(num_bytes: int) -> Callable[[int], Callable[[], object]]:
    """Gathers of two machines, as a connection of the loopback device joins them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wires = [socket.create_connection(server.getsockname()), server.accept()[0]]
    for wire in wires:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return shared(num_bytes, wires)


def gloo(num_bytes: int) -> Callable[[int], Callable[[], object]]:
    """Gathers of torch.distributed with gloo."""
    distributed: Any = torch.distributed  # whose stubs lack what is used here
    store = distributed.HashStore()

    def make(rank: int) -> Callable[[], object]:
        group = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        x = torch.zeros(num_bytes // 4)
        out = [torch.empty_like(x) for _ in range(2)]

        def run() -> None:
            for _ in range(100):
                group.allgather([out], [x]).wait()

        return run

    return make


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--gathers", action="store_true")
    args = parser.parse_args()
    if args.gathers:
        gathers()
    else:
        compare(args)


if __name__ == "__main__":
    main()
