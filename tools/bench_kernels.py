"""Speed of the kernels against what this machine can do at best: one JSON line per kernel and shape.

A product of few rows is limited by reading the weights from memory, one of many by the multiply-adds the registers can
do; the kernels that work on each row alone move bytes. Both limits are measured between the repetitions, since on a
shared machine they move. The best repetition counts, on both sides.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator

import torch

from quire import kernels
from quire.kernels import backend

SHAPES = ((4864, 896), (896, 4864), (4096, 4096), (151936, 896))  # n, k
ROWS = (1, 4, 8, 36, 128, 1024)
COLD_BYTES = 256 * 2**20  # read in turn: more than caches hold
PEAK_ROUNDS = 50_000
BYTES_CODE = len(backend.DTYPE_CODES)
"""of multiplications of bytes, after the dtypes"""


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    calls: list[Callable[[], object]],
    num_bytes: int,
    flops: int,
    dtype: torch.dtype,
    budget_s: float,
    format: str | None = None,
) -> dict[str, object]:
    """Time the calls in turn for budget_s; each reads and writes num_bytes and does `flops` operations.

    The peak is that of multiplications in `dtype`, or of bytes for a quantized `format`.
    """
    native, code = backend.native, BYTES_CODE if format else backend.DTYPE_CODES[dtype]
    memory = torch.ones(COLD_BYTES // 4)
    flops_of_peak = native.multiply_in_registers(code, 1) * kernels.num_threads() * PEAK_ROUNDS
    call_s = read_s = peak_s = float("inf")
    end = time.perf_counter() + budget_s
    for repeat, call in enumerate(itertools.cycle(calls)):
        call_s = min(call_s, seconds(call))
        if repeat % 8 == 0:
            read_s = min(read_s, seconds(lambda: native.read_memory(memory.data_ptr(), memory.nbytes)))
            peak_s = min(peak_s, seconds(lambda: native.multiply_in_registers(code, PEAK_ROUNDS)))
        if time.perf_counter() > end and repeat > 0:
            break
    return {
        "isa": kernels.isa(),
        "threads": kernels.num_threads(),
        "dtype": format or str(dtype).removeprefix("torch."),
        "us": round(call_s * 1e6, 1),
        "gb_per_s": round(num_bytes / call_s / 1e9, 1),
        "of_read_bandwidth": round(num_bytes / call_s * read_s / memory.nbytes, 3),
        "gflop_per_s": round(flops / call_s / 1e9, 1),
        "of_peak_flops": round(flops / call_s * peak_s / flops_of_peak, 3),
    }


def bench_matmul(
    n: int, k: int, rows: int, dtype: torch.dtype, budget_s: float, format: str | None = None
) -> dict[str, object]:
    """One product, on copies of the weight taken in turn so that each comes from memory; bytes are the weight's.

    With a `format` the weight is quantized, and the bytes are fewer.
    """
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    x = torch.randn(rows, k).to(dtype)

    num_bytes = kernels.quantized_bytes(n, k, format) if format else weight.nbytes

    def product() -> Callable[[], object]:
        packed = kernels.quantize_weight(weight, format) if format else kernels.pack_weight(weight)
        return lambda: kernels.matmul(x, packed)

    copies = [product() for _ in range(1 + COLD_BYTES // num_bytes)]
    result = measure(copies, num_bytes, 2 * rows * n * k, dtype, budget_s, format)
    return {"kernel": "matmul", "rows": rows, "n": n, "k": k} | result


def bench_row_kernels(rows: int, width: int, dtype: torch.dtype, budget_s: float) -> Iterator[dict[str, object]]:
    """Each kernel that works on rows alone; bytes are those of all tensors it reads and writes."""
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight, bias = torch.ones(width), torch.zeros(width)
    heads, positions, cos_sin = x.view(rows, -1, 64), torch.arange(rows), torch.randn(rows, 64)
    calls: dict[str, tuple[Callable[[], object], float]] = {  # and how many times the bytes of x it moves
        "rms_norm": (lambda: kernels.rms_norm(x, weight, 1e-6), 2),
        "add_rms_norm": (lambda: kernels.add_rms_norm(x, residual, weight, 1e-6), 4),
        "layer_norm": (lambda: kernels.layer_norm(x, weight, bias, 1e-6), 2),
        "add_layer_norm": (lambda: kernels.add_layer_norm(x, residual, weight, bias, 1e-6), 4),
        "gelu": (lambda: kernels.activation(x, "gelu"), 2),
        "gated silu": (lambda: kernels.gated_activation(x, "silu"), 1.5),
        "rotary_embedding": (lambda: kernels.rotary_embedding(heads, positions, cos_sin), 2),
    }
    for name, (call, times) in calls.items():
        result = measure([call], int(times * x.nbytes), 0, dtype, budget_s)
        del result["gflop_per_s"], result["of_peak_flops"]
        yield {"kernel": name, "rows": rows, "width": width} | result


def main() -> None:
    """Run every shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=kernels.num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each line")
    args = parser.parse_args()
    if backend.native is None:
        parser.error("there are no native kernels to measure")
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    for (n, k), format, rows in itertools.product(SHAPES, (None, *kernels.QUANTIZED_FORMATS), args.rows):
        print(json.dumps(bench_matmul(n, k, rows, dtype, args.seconds, format)), flush=True)
    for rows in args.rows:
        for line in bench_row_kernels(rows, 4096, dtype, args.seconds):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
