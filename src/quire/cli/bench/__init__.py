"""Measure how fast this machine runs a model, the kernels and the scheduler; each result is one line of JSON.

`throughput` and `latency` use random prompts, take the likeliest tokens unless --temperature is given, ignore
end-of-sequence tokens, and turn the prefix cache off, and speculation too unless --speculative-config is given: random
prompts say nothing about it. The machine's limits are measured in the same run, and each result says what share of
them was reached.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.cli.arguments.options import add_engine_arguments, add_model_argument
from quire.common.progress import above_bars

_BENCHMARKS = {
    "throughput": "tokens per second of a batch of prompts that all start together",
    "latency": "time to the first token and between tokens, under load",
    "steps": "single steps of the engine, from which fleets are simulated",
    "kernels": "every kernel except attention, for each number of rows",
    "attention": "decode and prefill attention, for each context length and number of sequences",
    "scheduler": "bookkeeping of a decode step, for each number of running and waiting requests; without a model",
}
_PROMPTS = {
    "num_prompts": (8, "number of prompts"),
    "input_len": (128, "tokens in each prompt"),
    "output_len": (64, "tokens to generate for each prompt"),
    "temperature": (0.0, "temperature of sampling; 0: take the likeliest token"),
    "top_p": (1.0, "sample among the likeliest tokens whose probabilities add up to N"),
}
_MACHINE = {"threads": (0, "kernel threads; 0: what the CPU set allows"), "seconds": (2.0, "seconds for each row")}
_OPTIONS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "throughput": _PROMPTS | {"runs": (2, "number of runs, of which the last is reported")},
    "latency": _PROMPTS
    | {
        "concurrency": (4, "requests that run at any time"),
        "request_rate": (0.0, "random arrivals per second, in place of --concurrency; 0: off"),
    },
    "steps": {
        "prompt_lens": ((16, 32, 36, 64, 256, 512, 1024, 2048), "tokens of a prompt"),
        "num_seqs": ((1, 2, 4, 8, 16, 32), "sequences that decode"),
        "context": ((64, 512), "tokens in the cache, of each sequence"),
    },
    "kernels": _MACHINE | {"rows": ((1, 4, 8, 36, 128, 1024), "tokens in the batch")},
    "attention": _MACHINE
    | {
        "context": ((128, 512, 2048, 8000, 16000), "tokens in the cache"),
        "num_seqs": ((1, 8, 32), "sequences"),
        "block_size": ((16,), "tokens in a block"),
    },
    "scheduler": {"num_seqs": ((1, 16, 64, 256), "running sequences"), "waiting": ((0, 100, 10**4, 10**5), "requests")},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand with its options for each benchmark."""
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
        if name in ("throughput", "latency", "steps"):
            add_model_argument(command)
            add_engine_arguments(command)
        if "threads" in _OPTIONS[name]:
            command.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
        if name in ("throughput", "steps"):
            command.add_argument("--json", action="store_true", help="print only the JSON object")


def run(options: argparse.Namespace) -> int:
    """Run one benchmark and print each row as soon as it is measured."""
    module = importlib.import_module(f"quire.cli.bench.{options.benchmark}")  # most load torch
    for row in module.measure(options):
        with above_bars():
            print(json.dumps(row), flush=True)
    return 0


def _at_least(minimum: float, kind: type) -> Callable[[str], Any]:
    def parse(value: str) -> Any:
        if not kind(value) >= minimum:
            raise argparse.ArgumentTypeError(f"{value}: must be at least {minimum}")
        return kind(value)

    return parse
