"""Speed of the matrix multiply against what this machine can do at best: one JSON line per shape.

Few rows are limited by reading the weights from memory, many by the multiply-adds the registers can do. Both limits are
measured between the repetitions, since on a shared machine they move. The best repetition counts, on both sides.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable

import torch

from quire import kernels
from quire.kernels import backend

SHAPES = ((4864, 896), (896, 4864), (4096, 4096), (151936, 896))  # n, k
ROWS = (1, 4, 8, 36, 128, 1024)
COLD_BYTES = 256 * 2**20  # read in turn: more than caches hold
PEAK_ROUNDS = 50_000


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bench_shape(n: int, k: int, rows: int, dtype: torch.dtype, budget_s: float) -> dict[str, object]:
    """Time one product for budget_s, on copies of the weight taken in turn so that each comes from memory."""
    native, threads, code = backend.native, kernels.num_threads(), backend.DTYPE_CODES[dtype]
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    copies = [kernels.pack_weight(weight) for _ in range(1 + COLD_BYTES // weight.nbytes)]
    x, memory = torch.randn(rows, k).to(dtype), torch.ones(COLD_BYTES // 4)
    flops_per_round = native.multiply_in_registers(code, 1) * threads
    product_s = read_s = peak_s = float("inf")
    end = time.perf_counter() + budget_s
    for repeat, packed in enumerate(itertools.cycle(copies)):
        product_s = min(product_s, seconds(lambda packed=packed: kernels.matmul(x, packed)))  # type: ignore[misc]
        if repeat % 8 == 0:
            read_s = min(read_s, seconds(lambda: native.read_memory(memory.data_ptr(), memory.nbytes)))
            peak_s = min(peak_s, seconds(lambda: native.multiply_in_registers(code, PEAK_ROUNDS)))
        if time.perf_counter() > end and repeat > 0:
            break
    bandwidth, flops = weight.nbytes / product_s, 2 * rows * n * k / product_s
    return {
        "kernel": "matmul",
        "isa": kernels.isa(),
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "n": n,
        "k": k,
        "us": round(product_s * 1e6, 1),
        "weight_gb_per_s": round(bandwidth / 1e9, 1),
        "of_read_bandwidth": round(bandwidth * read_s / memory.nbytes, 3),
        "gflop_per_s": round(flops / 1e9, 1),
        "of_peak_flops": round(flops * peak_s / (flops_per_round * PEAK_ROUNDS), 3),
    }


def main() -> None:
    """Run every shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=kernels.num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each shape and number of rows")
    args = parser.parse_args()
    if backend.native is None:
        parser.error("there are no native kernels to measure")
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)
    for (n, k), rows in itertools.product(SHAPES, args.rows):
        print(json.dumps(bench_shape(n, k, rows, getattr(torch, args.dtype), args.seconds)), flush=True)


if __name__ == "__main__":
    main()
