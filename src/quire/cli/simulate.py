"""Replay a trace through the real scheduler and block manager, with a fake model on a virtual clock.

One seed gives the same report to the byte. A trace file has one JSON object a line: arrival_s, prompt_len, output_len
and, where prompts begin alike, prefix_group and prefix_len.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.kv_cache import KVCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the synthetic trace (default: 0)")
    for flag, default, text in (
        ("--requests", 1000, "requests of the synthetic trace"),
        ("--num-blocks", 4096, "KV cache blocks"),
        ("--block-size", 16, "token slots per block"),
        ("--max-num-seqs", 256, "sequences that run at once, at most"),
        ("--max-num-batched-tokens", 2048, "tokens computed in one step, at most"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--num-host-blocks", type=int, default=0, metavar="N", help="blocks to swap out to (default: 0)"
    )
    parser.add_argument(
        "--preemption-mode", metavar="MODE", help="swap or recompute (default: swap while there is room)"
    )
    parser.add_argument("--requests-per-s", type=float, default=5.0, metavar="R", help="rate of arrivals (default: 5)")
    parser.add_argument("--no-prefix-caching", action="store_true", help="never reuse a prefix")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this JSONL file instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Simulate and report."""
    from quire.simulate.report import report
    from quire.simulate.simulator import Simulator
    from quire.simulate.trace import read_trace, synthetic_trace

    if options.requests < 1 or options.requests_per_s <= 0 or options.num_host_blocks < 0 or options.block_size < 1:
        raise ConfigError(
            "--requests, --requests-per-s and --block-size must be positive, --num-host-blocks not less than 0"
        )
    spec = KVCacheSpec(num_kv_heads=1, head_dim=2, dtype="float32")
    cache = kv_cache_config(
        [spec],
        options.block_size,
        num_blocks=options.num_blocks,
        host_bytes=options.num_host_blocks * options.block_size * spec.bytes_per_token,
    )
    limits = SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens, options.preemption_mode)
    simulator = Simulator(cache, limits, enable_prefix_caching=not options.no_prefix_caching)
    simulator.run(
        read_trace(options.trace)
        if options.trace is not None
        else synthetic_trace(options.seed, options.requests, requests_per_s=options.requests_per_s)
    )
    _print(report(simulator), options.json)
    return 0


def _print(figures: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:<20} {text}")
