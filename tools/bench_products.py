"""Benchmark of matrix products by weights of every format, at few rows: one line of JSON for each.

`ns` is the time for 1,024 weights, `of_limit` the share of the machine's limit, which is measured in between: reading
the weights once or multiplying by them, whichever takes longer. Weights take turns, so that they are read from memory.
"""

import argparse
import json
from functools import partial
from typing import Any

import torch

from quire import kernels
from quire.cli.bench.limits import COLD_BYTES, compare
from quire.kernels.weights import INTEGER_FORMATS, PackedWeight, QuantizedWeight

PLAIN = ("bfloat16", "float32")
FORMATS = (*PLAIN, *kernels.QUANTIZED_FORMATS, *kernels.BLOCK_FORMATS, *INTEGER_FORMATS)
BYTES = ("int8", "q8_0", "u8", "iq4", "mxfp4")  # multiply as int8 does, the others as int4
SCALES = {"half": torch.float16, "bfloat": torch.bfloat16, "float": torch.float32}


def make_weight(format: str, n: int, k: int, scale_range: int) -> PackedWeight | QuantizedWeight:
    """Return random weights [n, k]; those of INTEGER_FORMATS share a scale in `scale_range` neighbours."""
    if format in PLAIN:
        return kernels.pack_weight(torch.randn(n, k).to(getattr(torch, format)))
    if format in kernels.QUANTIZED_FORMATS:
        return kernels.quantize_weight(torch.randn(n, k).bfloat16(), format)
    if format in kernels.BLOCK_FORMATS:
        elements, num_bytes = kernels.block_size(format)
        finite = torch.randint(0, 256, (n, k // elements * num_bytes), dtype=torch.uint8) & 0x3B | 0x40
        return kernels.pack_blocks(finite, k, torch.bfloat16, format)
    bits, scales, *has_zeros = format[1:].split("_")
    integers = torch.randint(0, 2 ** int(bits), (n, k), dtype=torch.uint8)
    numbers = torch.rand(n, -(-k // scale_range)).to(SCALES[scales])
    zeros = torch.full(numbers.shape, 7, dtype=torch.uint8) if has_zeros else None
    parts = [kernels.PlacedIntegers.in_bytes(integers, int(bits))]
    return kernels.pack_integers(parts, numbers, zeros, torch.bfloat16, scale_range)


def measure(format: str, rows: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of rows of x."""
    first = make_weight(format, args.n, args.k, args.scale_range)
    copies = 1 if args.cached else 1 + args.megabytes * 2**20 // first.nbytes
    weights = [first, *(make_weight(format, args.n, args.k, args.scale_range) for _ in range(copies - 1))]
    found = []
    for count in rows:
        x = torch.randn(count, args.k, dtype=torch.float32 if format == "float32" else torch.bfloat16)
        place = torch.empty(count, args.n, dtype=x.dtype)  # memory that was never used is slow to write to
        out = [partial(kernels.matmul, x, weight, out=place) for weight in weights]
        limit = format if format in PLAIN else "int8" if format.startswith(BYTES) else "int4"
        row = compare(out, first.nbytes, 2 * count * args.n * args.k, limit, args.seconds)
        ns = row["us"] * 1e3 * 1024 / (args.n * args.k)
        kept = {name: row[name] for name in ("gb_per_s", "limit", "of_limit")}
        found.append({"format": format, "rows": count, "ns": round(ns, 1), **kept})
    return found


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="FORMAT")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("-n", type=int, default=4864)
    parser.add_argument("-k", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--scale-range", type=int, default=128, help="inputs that share a scale, as in AWQ and GPTQ")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row of the table")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cached", action="store_true", help="one weight again and again, from the caches")
    parser.add_argument("--megabytes", type=int, default=COLD_BYTES // 2**20, help="of weights that take turns")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels.set_num_threads(args.threads or kernels.num_threads())
    for format in args.formats:
        for row in measure(format, args.rows, args):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
