"""Benchmark of the KV cache: one line of JSON per row, with its target, the machine's limit or the published value.

Times are medians, and figures that are compared are measured interleaved in one run, because the speed of a shared
machine changes. Bookkeeping, which runs on one thread and never waits, is timed by that thread's CPU clock, so other
programs do not count. Rows that count tokens or blocks are the same on every machine.
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
import torch

from quire import LLM, SamplingParams, kernels
from quire.common.batch import BlockPairs, Draw, StepResult, Transfer
from quire.config.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence as Sample
from quire.engine.requests.sequence import SequenceGroup
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.interfaces.simulate.report import report
from quire.interfaces.simulate.simulator import Simulator
from quire.interfaces.simulate.workloads import synthetic_trace
from quire.kv.block_pool import BlockPool
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.prefix_cache.content_hash import token_bytes
from quire.runner.cache_engine import CacheEngine

Row = dict[str, Any]

BLOCK_SIZE = 16
VOCAB_SIZE = 151_936
TINY = FullAttentionSpec(1, 2, "float32")  # any: block accounting uses no tensors

NUM_SEQS = 256
DECODE_STEPS = 256
ACCOUNTING_TARGET_US = 1000

PROMPT_LEN = 32_000
LOOKUPS = 25
LOOKUP_TARGET_MS = 5

POOLS = (1_000, 10_000, 100_000, 1_000_000)
POOL_ROUNDS = 60
BLOCKS_PER_ROUND = 512

QWEN2_05B = (FullAttentionSpec(2, 64, "bfloat16"),) * 24
SWAPPED_BLOCKS = (128, 1024)
"""Blocks of 2,000 and 16,000 tokens."""
SWAP_TIER_BLOCKS = 4096
SWAP_ROUNDS = 31
SWAP_TARGET = 0.8

WIDTHS = (2, 4, 6)
PAPER_SAVINGS: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("alpaca", "n"): (0.061, 0.085, 0.098),
    ("sharegpt", "n"): (0.162, None, 0.305),
    ("alpaca", "beam_width"): (0.376, None, 0.552),
    ("sharegpt", "beam_width"): (0.443, None, 0.663),
}
"""Values of Kwon et al. 2023 (PagedAttention), figure 15 and section 6.3, for the WIDTHS; None: not in the text."""
SIMULATED_REQUESTS = 200
CHAT_BLOCKS = ((65_536, 0), (1000, 0), (1000, 2000))
"""Pairs of (blocks on the device, blocks on the host)."""


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time that one call takes on this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile by the nearest-rank method."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def cache_config(num_blocks: int, num_host_blocks: int = 0, specs: Sequence[KVCacheSpec] = (TINY,)) -> KVCacheConfig:
    """Return the configuration of a cache with these numbers of blocks."""
    return replace(kv_cache_config(specs, BLOCK_SIZE, num_blocks=num_blocks), num_host_blocks=num_host_blocks)


AMPLE = cache_config(65_536)


class DecodeLoop:
    """The real scheduler, block manager and commit, with random tokens in place of a model."""

    def __init__(self, prompt_lens: Sequence[int]) -> None:
        blocks = BlockSpaceManager(cache_config(NUM_SEQS * 64), enable_prefix_caching=True)
        self.scheduler = Scheduler(SchedulerConfig(len(prompt_lens), sum(prompt_lens)), blocks)
        self.requests = self.scheduler.requests
        self.committer = Committer(self.requests, max_model_len=2**20)
        self.rng = random.Random("decode loop")
        params = SamplingParams(temperature=0, max_tokens=2**19, detokenize=False)
        for index, prompt_len in enumerate(prompt_lens):
            prompt = self.rng.choices(range(VOCAB_SIZE), k=prompt_len)
            sample = Sample(self.requests.new_seq_id(), prompt, (Draw(0.0, 0, 1.0, b""),), SampleOutput(params))
            self.requests.add(SequenceGroup(OutputBuilder(str(index), prompt, params, 0.0), sample))

    def step(self) -> tuple[float, float]:
        """Run a step; return the seconds of schedule() and of commit()."""
        start = time.thread_time()
        batch = self.scheduler.schedule()
        schedule_s = time.thread_time() - start
        assert len(batch.sequences) == NUM_SEQS, "a sequence was left out"
        result = StepResult(tuple(self.rng.choices(range(VOCAB_SIZE), k=NUM_SEQS)))
        return schedule_s, cpu_seconds(lambda: self.committer.commit(batch, result))


def bench_accounting() -> Iterator[Row]:
    """Measure decode steps of 256 sequences of about 500 tokens.

    With `spread`, 16 of the sequences fill a block in each step. With `aligned`, the worst case, all 256 fill one in
    the same step of every 16, which the 99th percentile shows.
    """
    rng = random.Random("accounting")
    loops = {
        "spread": DecodeLoop([rng.randrange(250, 500) for _ in range(NUM_SEQS)]),
        "aligned": DecodeLoop([375] * NUM_SEQS),
    }
    for loop in loops.values():
        loop.step()  # the prompts
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(DECODE_STEPS):
        for name, loop in loops.items():
            times[name].append(loop.step())
    for name, steps in times.items():
        schedule, commit = zip(*steps, strict=True)
        both = [sum(step) for step in steps]
        median_us = statistics.median(both) * 1e6
        yield {
            "blocks_fill": name,
            "num_seqs": NUM_SEQS,
            "schedule_us": round(statistics.median(schedule) * 1e6),
            "commit_us": round(statistics.median(commit) * 1e6),
            "us": round(median_us),
            "p99_us": round(percentile(both, 99) * 1e6),
            "target_us": ACCOUNTING_TARGET_US,
            "of_target": round(median_us / ACCOUNTING_TARGET_US, 3),
        }


def run_once(blocks: BlockSpaceManager, seq_id: int, token_ids: list[int]) -> None:
    """Compute a sequence in one step and leave its blocks in the cache."""
    blocks.advance()
    blocks.allocate(blocks.look_up(seq_id, token_ids))
    blocks.append(seq_id, 0, len(token_ids))
    blocks.publish(seq_id, token_ids, len(token_ids))
    blocks.free(seq_id)
    blocks.forget(seq_id)


def bench_prefix_lookup() -> Iterator[Row]:
    """Measure the first look_up of a cached and of a new prompt, including hashing.

    For comparison, a single BLAKE2b over the same bytes is the least time that hashing can take.
    """
    rng = random.Random("prefix lookup")
    blocks = BlockSpaceManager(cache_config(2 * PROMPT_LEN // BLOCK_SIZE), enable_prefix_caching=True)
    cached = rng.choices(range(VOCAB_SIZE), k=PROMPT_LEN)
    run_once(blocks, 0, cached)
    seq_ids, content = count(1), token_bytes(cached)
    times: dict[str, list[float]] = {"cached": [], "new": [], "hash": []}
    for _ in range(LOOKUPS):
        for name in ("cached", "new"):
            prompt = list(cached) if name == "cached" else rng.choices(range(VOCAB_SIZE), k=PROMPT_LEN)
            seq_id = next(seq_ids)
            start = time.thread_time()
            hit = blocks.look_up(seq_id, prompt)
            times[name].append(time.thread_time() - start)
            assert hit.num_blocks == ((PROMPT_LEN - 1) // BLOCK_SIZE if name == "cached" else 0)
            blocks.forget(seq_id)
        times["hash"].append(cpu_seconds(lambda: blake2b(content, digest_size=16).digest()))
    hash_ms = statistics.median(times["hash"]) * 1e3
    for name in ("cached", "new"):
        ms = statistics.median(times[name]) * 1e3
        yield {
            "prompt": name,
            "num_tokens": PROMPT_LEN,
            "ms": round(ms, 3),
            "bare_hash_ms": round(hash_ms, 3),
            "target_ms": LOOKUP_TARGET_MS,
            "of_target": round(ms / LOOKUP_TARGET_MS, 3),
        }


class Pool:
    """An empty pool of a given size, and a manager with a full pool whose blocks are all cached content."""

    def __init__(self, num_blocks: int) -> None:
        self.empty = BlockPool(num_blocks, 1, lambda *_: None, lambda *_: None)
        self.full = BlockSpaceManager(cache_config(num_blocks), enable_prefix_caching=True, watermark=0)
        self._seq_ids, self._tokens = count(), count()
        while self.full.pool.num_free_blocks and self.full.stats.num_evicted_tokens == 0:
            self.evict_and_publish(min(num_blocks, 1000))

    def allocate_and_free(self) -> float:
        """Return the seconds per block; a round allocates several blocks before it frees them, like sequences."""
        start = time.thread_time()
        for block_id in [self.empty.allocate() for _ in range(BLOCKS_PER_ROUND)]:
            self.empty.free(block_id)
        return (time.thread_time() - start) / BLOCKS_PER_ROUND

    def evict_and_publish(self, num_blocks: int = BLOCKS_PER_ROUND) -> float:
        """Return the seconds per block of a new prompt: evict, allocate, publish and free, without hashing."""
        blocks, seq_id, num_tokens = self.full, next(self._seq_ids), num_blocks * BLOCK_SIZE
        token_ids = [next(self._tokens) for _ in range(num_tokens)]
        blocks.advance()
        hit = blocks.look_up(seq_id, token_ids)
        start = time.thread_time()
        blocks.allocate(hit)
        blocks.append(seq_id, 0, num_tokens)
        blocks.publish(seq_id, token_ids, num_tokens)
        blocks.free(seq_id)
        blocks.forget(seq_id)
        return (time.thread_time() - start) / num_blocks


def bench_allocate_flat() -> Iterator[Row]:
    """Measure the time per block in pools of many sizes; it must not grow with the pool."""
    pools = {num_blocks: Pool(num_blocks) for num_blocks in POOLS}
    operations = {"allocate+free": Pool.allocate_and_free, "evict+allocate+publish": Pool.evict_and_publish}
    for name, operation in operations.items():
        times: dict[int, list[float]] = {num_blocks: [] for num_blocks in POOLS}
        for _ in range(POOL_ROUNDS):
            for num_blocks, pool in pools.items():
                times[num_blocks].append(operation(pool))
        ns = {num_blocks: statistics.median(values) * 1e9 for num_blocks, values in times.items()}
        yield {
            "operation": name,
            "ns_by_num_blocks": {num_blocks: round(value) for num_blocks, value in ns.items()},
            "largest_over_smallest": round(ns[POOLS[-1]] / ns[POOLS[0]], 2),
        }


class MemoryCopy:
    """Ways to copy a large buffer with all threads, to measure the machine's speed."""

    def __init__(self, num_threads: int, num_bytes: int) -> None:
        self.num_threads, self.num_bytes = num_threads, num_bytes
        self._source, self._target = np.ones((2, num_bytes), np.uint8)  # in huge pages if the system has them
        self._threads = ThreadPoolExecutor(num_threads)

    def bytes_per_s(self) -> dict[str, float]:
        """Return the speed of each way; bytes are counted once."""
        source, target = torch.from_numpy(self._source), torch.from_numpy(self._target)
        torch.set_num_threads(self.num_threads)
        times = {"torch": seconds(lambda: target.copy_(source))}
        torch.set_num_threads(1)
        halves = (np.array_split(self._target, self.num_threads), np.array_split(self._source, self.num_threads))
        times["numpy"] = seconds(lambda: list(self._threads.map(np.copyto, *halves)))
        return {way: self.num_bytes / time_s for way, time_s in times.items()}


def bench_swap_bandwidth() -> Iterator[Row]:
    """Measure swapping scattered blocks of Qwen2-0.5B's layout, compared with a copy of large buffers."""
    config = cache_config(SWAP_TIER_BLOCKS, SWAP_TIER_BLOCKS, QWEN2_05B)
    bytes_per_block = config.total_bytes // config.num_blocks
    engine, rng = CacheEngine(config, kernels.backend_for("cpu")), random.Random("swap")
    for tier in engine.tiers:
        tier.fill_(1)  # touches every page
    copy, swaps = MemoryCopy(kernels.num_threads(), 2**28), {"swap_out": (0, 1), "swap_in": (1, 0)}

    def pairs(num_blocks: int) -> BlockPairs:
        ids = range(SWAP_TIER_BLOCKS)
        return tuple(zip(rng.sample(ids, num_blocks), rng.sample(ids, num_blocks), strict=True))

    for num_blocks in SWAPPED_BLOCKS:
        speeds = defaultdict[str, list[float]](list)
        for _ in range(SWAP_ROUNDS):
            for way, speed in copy.bytes_per_s().items():
                speeds[way].append(speed)
            for name, tiers in swaps.items():
                moved = (Transfer(*tiers, pairs(num_blocks)),)
                speeds[name].append(num_blocks * bytes_per_block / seconds(partial(engine.transfer, moved)))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        copy_speed = max(speed for name, speed in medians.items() if name not in swaps)
        for name in swaps:
            yield {
                "direction": name,
                "num_blocks": num_blocks,
                "threads": kernels.num_threads(),
                "gb_per_s": round(medians[name] / 1e9, 2),
                "copy_gb_per_s": round(copy_speed / 1e9, 2),
                "of_copy": round(medians[name] / copy_speed, 3),
                "target": SWAP_TARGET,
            }


def simulate(shape: str, config: KVCacheConfig, num_requests: int | None = SIMULATED_REQUESTS, **width: int) -> Row:
    """Return the simulator's report on a synthetic trace."""
    simulator = Simulator(config, SchedulerConfig(256, 2048))
    simulator.run(synthetic_trace(0, num_requests, shape=shape, **width))
    return report(simulator)


def bench_chat() -> Iterator[Row]:
    """Simulate conversations: the share of tokens known from earlier turns and users that is not recomputed.

    The cache is large enough, then too small, then too small with a host tier.
    """
    for num_blocks, num_host_blocks in CHAT_BLOCKS:
        figures = simulate("chat", cache_config(num_blocks, num_host_blocks), None)
        names = ("hit_of_possible", "prefix_hit_rate", "possible_hit_tokens", "prefix_tokens")
        yield {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks} | {name: figures[name] for name in names}


def bench_sharing(kind: str) -> Iterator[Row]:
    """Simulate the share of blocks that samples or beams of a request save by sharing, with the paper's values."""
    for shape in ("alpaca", "sharegpt"):
        for width, paper in zip(WIDTHS, PAPER_SAVINGS[shape, kind], strict=True):
            savings = simulate(shape, AMPLE, **{kind: width})["sharing_savings"]
            yield {"shape": shape, kind: width, "savings": savings, "paper": paper}


def bench_waste() -> Iterator[Row]:
    """Simulate the share of empty slots in used blocks; the paper reports less than 4 %."""
    for shape in ("alpaca", "sharegpt", "mixed"):
        yield {"shape": shape, "kv_waste": simulate(shape, AMPLE)["kv_waste"], "paper": 0.04}


def bench_repeated_prompt() -> Iterator[Row]:
    """Count the tokens computed for a repeated prompt, of whole blocks and not, with the embedded checkpoint."""
    llm = LLM(num_gpu_blocks_override=256, max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    rng = random.Random("repeated prompt")
    for num_tokens in (20 * BLOCK_SIZE, 20 * BLOCK_SIZE + 5):
        prompt = rng.choices(range(llm.engine.model_config.vocab_size), k=num_tokens)
        first, again = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        computed = [num_tokens - output.num_cached_tokens for output in (first, again)]
        yield {"prompt_tokens": num_tokens, "computed_first": computed[0], "computed_again": computed[1], "target": 1}


BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {
    "accounting": bench_accounting,
    "prefix_lookup": bench_prefix_lookup,
    "allocate_flat": bench_allocate_flat,
    "swap_bandwidth": bench_swap_bandwidth,
    "chat": bench_chat,
    "sharing_parallel": lambda: bench_sharing("n"),
    "sharing_beam": lambda: bench_sharing("beam_width"),
    "waste": bench_waste,
    "repeated_prompt": bench_repeated_prompt,
}


def main() -> None:
    """Run all benchmarks, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = tuple(BENCHMARKS)
    parser.add_argument("--only", choices=names, nargs="+", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--threads", type=int, help="threads for copies (default: what the CPU set and quota allow)")
    args = parser.parse_args()
    if args.threads:
        kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)
    for name in args.only:
        for row in BENCHMARKS[name]():
            print(json.dumps({"name": name} | row), flush=True)


if __name__ == "__main__":
    main()
