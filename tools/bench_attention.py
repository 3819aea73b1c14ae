"""Speed of attention, block copies and sampling against what this machine can do at best: one JSON line per case.

Decoding is limited by reading keys and values, prefill by multiply-adds in registers (the scores by bfloat16 ones where
the CPU has them), copying by a large memory copy. The limits are measured between the repetitions, since on a shared
machine they move; the best of each is compared. Decoding over an int8 cache is compared with the same over the dtype's,
in turn.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from quire import kernels
from quire.config.kv_cache import KVCacheSpec
from quire.kernels import backend

DECODES = (
    (14, 2, 64, 16000, 1),
    (14, 2, 64, 16000, 8),
    (32, 8, 128, 16000, 1),
    (32, 8, 128, 16000, 8),
    (32, 32, 128, 4096, 1),
    (14, 2, 64, 1024, 32),
)
"""num_heads, num_kv_heads, head_dim, context, number of sequences"""
INT8_DECODES = ((14, 2, 64, 8000, 1), (14, 2, 64, 8000, 8), (32, 8, 128, 8000, 1), (32, 8, 128, 8000, 8))
PREFILLS = ((14, 2, 64, 2048), (32, 8, 128, 2048))
"""num_heads, num_kv_heads, head_dim, tokens"""
COPIES = (32 * 1024, 1024 * 1024)
"""bytes of a block"""
DRAWS = ((0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 50, 1.0), (0.8, 0, 0.95))
"""temperature, top_k, top_p"""
BLOCK_SIZE = 16
VOCAB = 151936


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best_of(repeats: int, call: Callable[[], object], limit: Callable[[], float]) -> tuple[float, float]:
    """The shortest time of `call`, and the largest of `limit`, measured in turn."""
    call()
    times, limits = zip(*((seconds(call), limit()) for _ in range(repeats)), strict=True)
    return min(times), max(limits)


def read_speed(scratch: torch.Tensor) -> float:
    """Bytes per second that all threads read."""
    return scratch.nbytes / seconds(lambda: backend.native.read_memory(scratch.data_ptr(), scratch.nbytes))


def flop_speed(dtype: torch.dtype, rounds: int = 200_000) -> float:
    """Operations per second of multiply-adds in registers, on all threads."""
    start = time.perf_counter()
    per_round = backend.native.multiply_in_registers(backend.DTYPE_CODES[dtype], rounds)
    return float(per_round) * rounds * kernels.num_threads() / (time.perf_counter() - start)


def make_inputs(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context: int,
    query_len: int,
    num_seqs: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """paged_attention's arguments for equal sequences in shuffled blocks; the cache is of `dtype` unless told."""
    spec = KVCacheSpec(num_kv_heads, head_dim, str(cache_dtype or dtype).removeprefix("torch."))
    blocks = -(-context // BLOCK_SIZE)
    num_blocks = blocks * num_seqs
    buffer = torch.zeros(num_blocks * BLOCK_SIZE * spec.bytes_per_token, dtype=torch.uint8)
    k_cache, v_cache = kernels.make_layer_cache(
        buffer, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, cache_dtype or dtype
    )
    for slots in torch.tensor_split(torch.arange(num_blocks * BLOCK_SIZE), -(-num_blocks // 256)):
        key, value = torch.randn(2, len(slots), num_kv_heads, head_dim).to(dtype)
        kernels.write_kv(key, value, k_cache, v_cache, slots)
    query = torch.randn(query_len * num_seqs, num_heads, head_dim).to(dtype)
    query_start = torch.arange(0, query_len * num_seqs + 1, query_len, dtype=torch.int32)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    block_tables = torch.randperm(num_blocks).int().view(num_seqs, blocks)
    return query, k_cache, v_cache, query_start, seq_lens, block_tables, head_dim**-0.5


def bench_decode(case: tuple[int, int, int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, object]:
    """One token of each sequence, on enough caches that none stays in the processor's."""
    num_heads, num_kv_heads, head_dim, context, num_seqs = case
    num_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize * context * num_seqs
    caches = [
        make_inputs(num_heads, num_kv_heads, head_dim, context, 1, num_seqs, dtype)
        for _ in range(max(1, 256_000_000 // num_bytes))
    ]
    scratch = torch.ones(64 * 2**20)
    turn = iter(range(10**9))
    best, limit = best_of(
        max(repeats, len(caches)),
        lambda: kernels.paged_attention(*caches[next(turn) % len(caches)]),
        lambda: read_speed(scratch),
    )
    return {
        "kernel": "decode", "heads": case[:3], "context": context, "num_seqs": num_seqs, "us": round(best * 1e6, 1),
        "gb_per_s": round(num_bytes / best / 1e9, 1), "of_read": round(num_bytes / best / limit, 3),
    }  # fmt: skip


def bench_int8_decode(case: tuple[int, int, int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, object]:
    """One token of each sequence over an int8 cache, and in turn over one of `dtype`; none stays in the processor's."""
    num_heads, num_kv_heads, head_dim, context, num_seqs = case
    num_bytes = 2 * num_kv_heads * (head_dim + 4) * context * num_seqs
    count = max(1, 128_000_000 // num_bytes)
    int8, plain = (
        [make_inputs(num_heads, num_kv_heads, head_dim, context, 1, num_seqs, dtype, cache_dtype) for _ in range(count)]
        for cache_dtype in (torch.int8, dtype)
    )
    next_int8, next_plain = itertools.cycle(int8), itertools.cycle(plain)
    best, speed = best_of(
        max(repeats, count),
        lambda: kernels.paged_attention(*next(next_int8)),
        lambda: 1 / seconds(lambda: kernels.paged_attention(*next(next_plain))),
    )
    return {
        "kernel": "decode_int8", "heads": case[:3], "context": context, "num_seqs": num_seqs,
        "us": round(best * 1e6, 1), "gb_per_s": round(num_bytes / best / 1e9, 1),
        "us_of_dtype": round(1e6 / speed, 1), "speedup": round(1 / (speed * best), 2),
    }  # fmt: skip


def bench_prefill(case: tuple[int, int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, object]:
    """One prompt in one call."""
    num_heads, num_kv_heads, head_dim, tokens = case
    inputs = make_inputs(num_heads, num_kv_heads, head_dim, tokens, tokens, 1, dtype)
    best, limit = best_of(repeats, lambda: kernels.paged_attention(*inputs), lambda: flop_speed(dtype))
    flops = 2 * 2 * num_heads * head_dim * tokens * (tokens + 1) / 2
    return {
        "kernel": "prefill", "heads": case[:3], "tokens": tokens, "us": round(best * 1e6, 1),
        "gflop_per_s": round(flops / best / 1e9, 1), "of_peak": round(flops / best / limit, 3),
    }  # fmt: skip


def bench_copy(block_bytes: int, repeats: int) -> dict[str, object]:
    """Every other block of a pool to the block after it, against memcpy of the same number of bytes in two halves."""
    pool = torch.ones(256 * 2**20 // block_bytes, block_bytes, dtype=torch.uint8)
    pairs = torch.randperm(len(pool)).view(-1, 2)
    num_bytes = len(pairs) * block_bytes
    flat = pool.view(2, -1)
    best, limit = best_of(
        repeats,
        lambda: kernels.copy_blocks(pool, pool, pairs),
        lambda: num_bytes / seconds(lambda: flat[1].copy_(flat[0])),
    )
    return {
        "kernel": "copy_blocks", "block_bytes": block_bytes, "us": round(best * 1e6, 1),
        "gb_per_s": round(num_bytes / best / 1e9, 1), "of_copy": round(num_bytes / best / limit, 3),
    }  # fmt: skip


def bench_sample(case: tuple[float, int, float], repeats: int) -> dict[str, object]:
    """Rows of a large vocabulary, peaked as a language model's."""
    num_rows = 16
    logits = torch.randn(num_rows, VOCAB) * 3
    full = torch.ones(num_rows, dtype=torch.float64)
    temperature, top_k, top_p = case
    arguments = (logits, full * temperature, (full * top_k).long(), full * top_p, torch.rand(num_rows).double())
    scratch = torch.ones(64 * 2**20)
    best, limit = best_of(repeats, lambda: kernels.sample(*arguments), lambda: read_speed(scratch))
    return {
        "kernel": "sample", "temperature": temperature, "top_k": top_k, "top_p": top_p, "vocab": VOCAB,
        "us_per_row": round(best * 1e6 / num_rows, 1), "of_read": round(logits.nbytes / best / limit, 3),
    }  # fmt: skip


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        kernels.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    common = {"isa": kernels.isa(), "threads": kernels.num_threads(), "dtype": args.dtype}
    torch.set_num_threads(1)
    for decode in DECODES:
        print(json.dumps(bench_decode(decode, dtype, args.repeats) | common), flush=True)
    for decode in INT8_DECODES:
        print(json.dumps(bench_int8_decode(decode, dtype, args.repeats) | common), flush=True)
    for prefill in PREFILLS:
        print(json.dumps(bench_prefill(prefill, dtype, args.repeats) | common), flush=True)
    for block_bytes in COPIES:
        print(json.dumps(bench_copy(block_bytes, args.repeats) | common), flush=True)
    for draw in DRAWS:
        print(json.dumps(bench_sample(draw, args.repeats) | common), flush=True)


if __name__ == "__main__":
    main()
