"""Measure how fast this machine runs a model, the kernels and the scheduler: one JSON line per row.

`throughput` and `latency` generate for random prompts: greedy, end-of-sequence tokens ignored, prefix cache off. What
the machine can do at best is measured in the same run, and a row says what share of it was reached.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.cli.options import add_engine_arguments

_BENCHMARKS = {
    "throughput": "tokens per second of a batch that starts together",
    "latency": "time to the first token and from token to token, at a load",
    "kernels": "all kernels but attention, by rows",
    "attention": "decode and prefill, by context and sequences",
    "scheduler": "bookkeeping of a decode step, by running and waiting requests; no model",
}
_PROMPTS = {
    "num_prompts": (8, "prompts in all"),
    "input_len": (128, "tokens of each"),
    "output_len": (64, "to generate"),
}
_MACHINE = {"threads": (0, "of the kernels; 0: what the CPU set allows"), "seconds": (2.0, "time for each row")}
_OPTIONS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "throughput": _PROMPTS | {"runs": (2, "times to run it; the last counts")},
    "latency": _PROMPTS
    | {
        "concurrency": (4, "requests that are there at any time"),
        "request_rate": (0.0, "arrivals a second, at random, instead; 0: off"),
    },
    "kernels": _MACHINE | {"rows": ((1, 4, 8, 36, 128, 1024), "tokens in the batch")},
    "attention": _MACHINE
    | {"context": ((128, 512, 2048, 8000, 16000), "tokens in the cache"), "num_seqs": ((1, 8, 32), "sequences")},
    "scheduler": {"num_seqs": ((1, 16, 64, 256), "running"), "waiting": ((0, 100, 10_000, 100_000), "behind them")},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of each benchmark."""
    parsers = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, summary in _BENCHMARKS.items():
        command = parsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        for option, (default, text) in _OPTIONS[name].items():
            values = default if isinstance(default, tuple) else (default,)
            kind = type(values[0])
            command.add_argument(
                "--" + option.replace("_", "-"),
                type=_at_least(0 if kind is float or 0 in values else 1, kind),
                nargs="+" if values is default else None,
                default=default,
                metavar="N",
                help=f"{text} (default: {' '.join(map(str, values))})",
            )
        if name in ("throughput", "latency"):
            add_engine_arguments(command)
        if "threads" in _OPTIONS[name]:
            command.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
        if name == "throughput":
            command.add_argument("--json", action="store_true", help="print nothing but the JSON object")


def run(options: argparse.Namespace) -> int:
    """Run one of them, printing each row as it comes."""
    module = importlib.import_module(f"quire.cli.bench.{options.benchmark}")  # most load torch
    for row in module.measure(options):
        print(json.dumps(row), flush=True)
    return 0


def _at_least(minimum: float, kind: type) -> Callable[[str], Any]:
    def parse(value: str) -> Any:
        if not kind(value) >= minimum:
            raise argparse.ArgumentTypeError(f"{value}: must be at least {minimum}")
        return kind(value)

    return parse
