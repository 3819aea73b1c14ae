"""Replay a trace of requests through the real scheduler and block manager, with a fake model and a virtual clock.

The same seed always gives the same report. A trace file has one JSON object per line, with arrival_s, prompt_len and
output_len, and optionally prefix_group and prefix_len, tenant, priority, n, beam_width, session and think_s.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.common.arguments.options import tenant_weights
from quire.common.errors import ConfigError
from quire.common.log import show_messages
from quire.config.kv_cache import FullAttentionSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import MOST_TOKENS, SpeculativeConfig

if TYPE_CHECKING:
    from quire.interfaces.simulate.simulator import Simulator
    from quire.interfaces.simulate.trace import TraceRequest

_SYNTHETIC = ("requests", "shape", "requests_per_s", "n", "beam_width")
"""Options that have an effect only on the synthetic trace."""
_LONG_REQUESTS, _LONG_BYTES = 20_000, 2 << 20
"""Traces from this number of requests, or this size of their file, on are long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    trace = parser.add_argument_group("trace")
    _add(trace, "--trace", Path, "FILE", "replay this JSONL file; without it, a synthetic trace")
    _add(trace, "--seed", int, "S", "seed of the synthetic trace", 0)
    _add(trace, "--shape", str, "NAME", "mixed, alpaca, sharegpt, chat or tenants (default: mixed)")
    _add(trace, "--requests", int, "N", "number of requests (default: 1000; for chat 32 users with 8 turns)")
    _add(trace, "--requests-per-s", float, "R", "arrivals per second; for chat, of users (default: 5)")
    _add(trace, "--n", int, "N", "parallel samples of each request (default: 1)")
    _add(trace, "--beam-width", int, "K", "beams of each request (default: 1)")
    limits = parser.add_argument_group("limits")
    _add(limits, "--num-blocks", int, "N", "KV cache blocks", 4096)
    _add(limits, "--num-host-blocks", int, "N", "blocks of host memory for swapped-out requests", 0)
    _add(limits, "--block-size", int, "N", "token slots per block", 16)
    _add(limits, "--max-num-seqs", int, "N", "largest number of sequences that run at once", 256)
    _add(limits, "--max-num-batched-tokens", int, "N", "largest number of tokens computed in one step", 2048)
    _add(limits, "--preemption-mode", str, "MODE", "swap or recompute (default: the cheaper one)")
    _add(limits, "--policy", str, "NAME", "fcfs, priority, fair or prefix", "fcfs")
    _add(limits, "--tenant-weights", tenant_weights, "A=2,B=1", "policy fair: shares of tenants (default: 1 each)")
    _add(limits, "--target-step-ms", float, "MS", "shorten prefill chunks to this step time")
    limits.add_argument("--no-prefix-caching", action="store_true", help="never reuse a prefix")
    speculation = parser.add_argument_group("speculation")
    _add(speculation, "--acceptance", float, "P", "draft tokens, each right with this probability (default: no drafts)")
    _add(speculation, "--draft-length", int, "N", "with --acceptance: most drafts of a sequence in a step (default: 4)")
    fleet = parser.add_argument_group("fleet")
    _add(fleet, "--engines", int, "N", "simulate N engines behind the router; with --max-engines, from N engines on")
    _add(fleet, "--max-engines", int, "N", "add engines by the number of unfinished requests, up to N")
    _add(fleet, "--target-requests", float, "R", "unfinished requests for each engine that --max-engines aims at", 16.0)
    _add(fleet, "--start-s", float, "S", "seconds until another engine is ready", 10.0)
    _add(
        fleet, "--deaths", str, "T:N,...", "seconds at which the engines of these numbers die, for example 10:0,25.5:3"
    )
    _add(fleet, "--death-rate", float, "R", "random deaths for each engine and hour", 0.0)
    _add(fleet, "--costs", Path, "FILE", "rows of `quire bench steps`, for the time of a step (default: made-up costs)")
    _add(fleet, "--tensor-parallel-size", int, "T", "degree of each engine; --costs has rows of it", 1)
    _add(fleet, "--parallel-efficiency", float, "E", "steps take 1 / (T * E) of those of degree 1 instead")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    _add(output, "--plot", Path, "FILE", "plot blocks, queues and hit rate as .png or .svg")


def _add(
    group: argparse._ArgumentGroup, flag: str, kind: Callable[[str], Any], metavar: str, text: str, default: Any = None
) -> None:
    shown = "" if default is None else f" (default: {default})"
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)


def run(options: argparse.Namespace) -> int:
    """Simulate and report."""
    from quire.interfaces.simulate.plot import check_plot_path, save_plot
    from quire.interfaces.simulate.report import report

    show_messages()
    make_trace, make_engine = _trace(options), _engines(options)
    if options.engines is not None:
        return _run_fleet(options, make_trace, make_engine)
    for name in ("max_engines", "deaths"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is of a fleet: give --engines as well")
    simulator = make_engine()
    if options.plot is not None:  # before the simulation, which can take minutes
        check_plot_path(options.plot)
    record = simulator.run(make_trace())
    if options.plot is not None:
        save_plot(record.moments, options.num_blocks, options.plot)
    _print(report(simulator), options.json)
    return 0


def _run_fleet(
    options: argparse.Namespace, make_trace: Callable[[], Iterator[TraceRequest]], make_engine: Callable[[], Simulator]
) -> int:
    from quire.interfaces.simulate.fleet.events import MAX_ENGINES, Deaths, Scaling, parse_deaths
    from quire.interfaces.simulate.fleet.plot import save_fleet_plot
    from quire.interfaces.simulate.fleet.report import fleet_report
    from quire.interfaces.simulate.fleet.simulator import FleetSimulator
    from quire.interfaces.simulate.plot import check_plot_path

    number, most = options.engines, options.engines if options.max_engines is None else options.max_engines
    if not 1 <= number <= MAX_ENGINES:
        raise ConfigError(f"--engines {number}: must be from 1 to {MAX_ENGINES}")
    limits = Scaling(number, most, options.target_requests)
    deaths = Deaths(() if options.deaths is None else parse_deaths(options.deaths), options.death_rate, options.seed)
    if options.max_engines is None and (last := max([engine for _, engine in deaths.at], default=0)) >= number:
        raise ConfigError(
            f"--deaths {options.deaths}: there is no engine {last}, --engines {number} are 0 to {number - 1}"
        )
    if not 0 <= options.start_s < 1e9:
        raise ConfigError(f"--start-s {options.start_s:g}: must be from 0 to 1e9")
    if options.plot is not None:
        check_plot_path(options.plot)
    scaling = None if options.max_engines is None else limits
    fleet = FleetSimulator(make_engine, number, deaths=deaths, scaling=scaling, start_s=options.start_s)
    if _is_long(options) and len(os.sched_getaffinity(0)) > 1:
        fleet.run_with_helper(make_trace)
    else:
        fleet.run(make_trace())
    if options.plot is not None:
        save_fleet_plot(fleet.moments, options.plot)
    _print(fleet_report(fleet), options.json)
    return 0


def _is_long(options: argparse.Namespace) -> bool:
    """Whether a process that makes the prompts is worth its start."""
    if options.trace is not None:
        return bool(options.trace.is_file() and options.trace.stat().st_size >= _LONG_BYTES)
    return bool(options.requests and options.requests >= _LONG_REQUESTS)


def _trace(options: argparse.Namespace) -> Callable[[], Iterator[TraceRequest]]:
    """Return what makes the trace."""
    from quire.interfaces.simulate.trace import read_trace
    from quire.interfaces.simulate.workloads import synthetic_trace

    given = {name: getattr(options, name) for name in _SYNTHETIC if getattr(options, name) is not None}
    if options.trace is not None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigError(
                f"{flag} applies only to the synthetic trace, not to --trace {options.trace}: give one of them"
            )
        return partial(read_trace, options.trace)
    return partial(synthetic_trace, options.seed, given.pop("requests", None), **given)


def _engines(options: argparse.Namespace) -> Callable[[], Simulator]:
    """Return what makes an engine with the options' limits."""
    from quire.interfaces.simulate.fleet.costs import read_costs
    from quire.interfaces.simulate.simulator import Simulator

    if options.block_size < 1 or options.num_host_blocks < 0:
        raise ConfigError("--block-size must be positive, --num-host-blocks not less than 0")
    if not 0.0 <= (1.0 if options.acceptance is None else options.acceptance) <= 1.0:
        raise ConfigError(f"--acceptance {options.acceptance}: must be from 0 to 1")
    draft_length = 4 if options.draft_length is None else options.draft_length
    if not 1 <= draft_length <= MOST_TOKENS:
        raise ConfigError(f"--draft-length {draft_length}: must be from 1 to {MOST_TOKENS}")
    if options.draft_length is not None and options.acceptance is None:
        raise ConfigError(f"--draft-length {draft_length}: without --acceptance nothing is drafted; give that as well")
    spec = FullAttentionSpec(num_kv_heads=1, head_dim=2, dtype="float32")
    cache = kv_cache_config(
        [spec],
        options.block_size,
        num_blocks=options.num_blocks,
        host_bytes=options.num_host_blocks * spec.block_bytes(options.block_size),
    )
    limits = SchedulerConfig(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.preemption_mode,
        policy=options.policy,
        tenant_weights=options.tenant_weights or {},
        target_step_ms=options.target_step_ms,
        max_draft_rows=SpeculativeConfig(num_speculative_tokens=draft_length).num_rows(
            options.max_num_seqs, options.max_num_batched_tokens
        ),
    )
    drafts = {"acceptance": options.acceptance, "draft_length": draft_length}
    cost = None
    if options.costs is not None:
        cost = read_costs(options.costs, options.tensor_parallel_size, options.parallel_efficiency)
    elif options.tensor_parallel_size != 1 or options.parallel_efficiency is not None:
        raise ConfigError(
            "--tensor-parallel-size and --parallel-efficiency need --costs: write it with quire bench steps"
        )
    return partial(Simulator, cache, limits, enable_prefix_caching=not options.no_prefix_caching, cost=cost, **drafts)


def _print(figures: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if name == "tenants":
            for tenant, own in value.items():
                print(f"tenant {tenant!r}: {_text(own)}")
        else:
            print(f"{name:<20} {_text(value)}")


def _text(value: Any) -> str:
    """Return a value of the report as one line of text."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} ({_text(own)})" if isinstance(own, dict) else f"{key} {own}" for key, own in value.items())
