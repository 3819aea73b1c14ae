"""Speed of the matrix multiply against what this machine can do at best: one JSON line per shape.

Few rows are limited by reading the weights, many by multiply-adds in registers. Both limits are measured between the
repetitions, since on a shared machine they move; the best of each is compared.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch

from quire import kernels
from quire.kernels import backend

SHAPES = ((4864, 896), (896, 4864), (151936, 896))
ROWS = (1, 4, 8, 36, 128, 1024)


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bench_shape(n: int, k: int, rows: int, dtype: torch.dtype, repeats: int) -> dict[str, object]:
    """Time one product, on enough copies of the weight that none stays in the caches, and both limits beside it."""
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    copies = max(1, min(24, 300_000_000 // weight.nbytes))
    packed = [kernels.pack_weight(weight) for _ in range(copies)]
    x = torch.randn(rows, k).to(dtype)
    scratch = torch.ones(256 * 2**20 // 4)
    rounds = 200_000
    best, best_read, best_flops = 1e9, 0.0, 0.0
    kernels.matmul(x, packed[0])
    flops = 2 * rows * n * k
    for _ in range(max(1, repeats // copies)):
        for copy in packed:
            best = min(best, seconds(partial(kernels.matmul, x, copy)))
        best_read = max(
            best_read, scratch.nbytes / seconds(lambda: backend.native.read_memory(scratch.data_ptr(), scratch.nbytes))
        )
        start = time.perf_counter()
        per_round = backend.native.multiply_in_registers(backend.DTYPE_CODES[dtype], rounds)
        best_flops = max(best_flops, per_round * rounds * kernels.num_threads() / (time.perf_counter() - start))
    return {
        "kernel": "matmul",
        "isa": kernels.isa(),
        "threads": kernels.num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "n": n,
        "k": k,
        "us": round(best * 1e6, 1),
        "gb_per_s": round(weight.nbytes / best / 1e9, 1),
        "of_read": round(weight.nbytes / best / best_read, 3),
        "gflop_per_s": round(flops / best / 1e9, 1),
        "of_peak": round(flops / best / best_flops, 3),
        "read_gb_s": round(best_read / 1e9, 1),
        "peak": round(best_flops / 1e9, 1),
    }


def main() -> None:
    """Run every shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    args = parser.parse_args()
    if args.threads:
        kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)
    for n, k in SHAPES:
        for rows in args.rows:
            print(json.dumps(bench_shape(n, k, rows, getattr(torch, args.dtype), args.repeats)), flush=True)


if __name__ == "__main__":
    main()
