"""Compare ranks of one thread each with one process of as many threads, and measure what putting parts together costs.

    python -m tools.bench_ranks MODEL [--quantization int8] [--prompts 1 8 32] [--ranks 2] [--steps 24] [--gathers]

Both engines are alive and take turns. Prints one line of JSON per number of prompts: the quarter of the fastest decode
steps of each, and the ratio of their speeds, above 1 where ranks are faster; and one for a prefill of 1,024 tokens.
With --gathers, the time of a gather by the bytes that a rank adds.
"""

import argparse
import json
import os
import threading
import time
from typing import Any

import torch

from quire import LLM, SamplingParams, kernels
from quire.config.parallel import Shard

CPUS = sorted(os.sched_getaffinity(0))


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

    def step(self) -> None:
        """Run a step and keep its time."""
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
    one = Decoding(LLM(args.model, num_threads=args.ranks, **given))
    ranks = Decoding(LLM(args.model, tensor_parallel_size=args.ranks, **given))
    for num_prompts in args.prompts:
        for each in (one, ranks):
            each.begin(num_prompts, args.steps)
        for _ in range(args.steps):
            one.step()
            ranks.step()
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
    """Print the time of a gather of two ranks, by the bytes that each adds: recorded, in pinned threads."""
    slot, width = 512 * 1024, 256
    for num_bytes in (1024, 4096, 16384, 65536, 262144, 1048576):
        memory = os.memfd_create("ranks")
        os.ftruncate(memory, kernels.rank_memory_bytes(2, slot))
        times, barrier = list[float](), threading.Barrier(2)

        def run(rank: int, memory: int, num_bytes: int, times: list[float], barrier: threading.Barrier) -> None:
            os.sched_setaffinity(0, {CPUS[rank]})  # of this thread alone
            ranks = kernels.Ranks.join(Shard(rank, 2), memory, slot)
            gather, x = kernels.Gather(ranks, [width, width]), torch.zeros(num_bytes // (4 * width), width)
            backend = kernels.backend_for("cpu")
            graph, workspace = backend.graph(), backend.workspace()
            with workspace.recording(), graph.record():
                for _ in range(100):
                    gather(x)
            barrier.wait()
            for _ in range(20):
                start = time.perf_counter()
                graph.replay()
                times.append((time.perf_counter() - start) / 100)

        given = memory, num_bytes, times, barrier
        threads = [threading.Thread(target=run, args=(rank, *given)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps({"bytes": num_bytes, "gather_us": round(1e6 * quarter(times), 2)}), flush=True)
        os.close(memory)


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--gathers", action="store_true")
    args = parser.parse_args()
    if args.gathers:
        gathers()
    else:
        compare(args)


if __name__ == "__main__":
    main()
