"""Show how memory would be used (weights, activations, KV cache) and what fits into the cache. Reads no weights, but
compares their names, shapes and dtypes with the config.

With --fleet, find the smallest number of such engines that keeps limits of latency on a trace, by simulation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.arguments.options import add_engine_arguments, add_model_argument, engine_kwargs
from quire.common.errors import ConfigError
from quire.common.log import show_messages
from quire.config.args import EngineArgs
from quire.config.checkpoint.draft_heads import own_head
from quire.engine.routing.replicas import replica_args

if TYPE_CHECKING:
    from quire.interfaces.simulate.fleet.search import FleetPoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--fleet", type=Path, metavar="TRACE", help="find the smallest fleet for this JSONL file")
    fleet.add_argument("--slo", metavar="LIMITS", help="limits of latency, for example ttft=1s,itl=80ms")
    fleet.add_argument("--percentile", type=int, default=95, metavar="P", help="percentile within limits (default: 95)")
    fleet.add_argument("--costs", type=Path, metavar="FILE", help="rows of `quire bench steps` on such an engine")
    fleet.add_argument("--max-engines", type=int, default=64, metavar="N", help="largest fleet to try (default: 64)")
    fleet.add_argument("--degrees", default="1", metavar="T,...", help="tensor parallel degrees to try (default: 1)")
    fleet.add_argument(
        "--parallel-efficiency", type=float, metavar="E", help="steps of degree T take 1 / (T * E) of those of degree 1"
    )
    fleet.add_argument("--plot", type=Path, metavar="FILE", help="plot the curve as .png or .svg")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the memory plan, or the fleet."""
    from quire.models.weights.loader import check_weights  # loads torch
    from quire.runner.memory_plan import plan_memory

    show_messages()
    if options.fleet is None and (options.slo is not None or options.costs is not None or options.plot is not None):
        raise ConfigError("--slo, --costs and --plot have no effect without --fleet: give --fleet TRACE as well")
    if options.fleet is not None:
        return _plan_fleet(options)
    args = EngineArgs(**engine_kwargs(options))
    num_engines = 1 if args.distributed_executor_backend == "ray" else args.data_parallel_size
    if num_engines != 1:
        args.resolve()  # raises ConfigError for a number out of bounds, and for several engines on several machines
        args = replica_args(args)[0]
    plan = plan_memory(args)
    for model in filter(None, (plan.config.model, plan.config.draft)):
        check_weights(model)
    has_unused = plan.config.draft is None and own_head(plan.config.model) == "mtp"
    if options.json:
        print(json.dumps(plan.to_dict() | {"data_parallel_size": num_engines, "has_unused_mtp_layer": has_unused}))
        return 0
    print(plan)
    if num_engines > 1:
        print(f"engines     {num_engines}; this is the plan of each, in its part of the memory and the CPUs")
    if has_unused:
        print(
            """unused      a layer for multi-token prediction, to draft by --speculative-config '{"method": "mtp"}'"""
        )
    return 0


def _plan_fleet(options: argparse.Namespace) -> int:
    from quire.interfaces.simulate.fleet.costs import read_costs
    from quire.interfaces.simulate.fleet.plot import save_curve
    from quire.interfaces.simulate.fleet.search import FleetSearch, Slo, refusal, smallest
    from quire.interfaces.simulate.plot import check_plot_path
    from quire.interfaces.simulate.simulator import Simulator
    from quire.interfaces.simulate.trace import read_trace
    from quire.runner.memory_plan import plan_memory

    if options.slo is None or options.costs is None:
        raise ConfigError(
            "--fleet needs --slo, for example ttft=1s,itl=80ms, and --costs: write it with quire bench steps"
        )
    if engine_kwargs(options).get("data_parallel_size", 1) != 1:
        raise ConfigError("--fleet finds out how many engines are needed: leave out --data-parallel-size")
    slo, degrees = Slo.parse(options.slo, options.percentile), _degrees(options.degrees)
    if options.plot is not None:
        check_plot_path(options.plot)
    trace = list(read_trace(options.fleet))
    plan = plan_memory(EngineArgs(**engine_kwargs(options)))
    model = plan.config.model
    planned = {
        "model": model.model,
        "dtype": model.dtype,
        "quantization": model.quantization or "none",
        "num_threads": plan.config.parallel.num_threads,
    }
    costs = {degree: read_costs(options.costs, degree, options.parallel_efficiency, planned) for degree in degrees}

    def make_engine(degree: int) -> Simulator:
        caching = plan.config.cache.enable_prefix_caching
        return Simulator(plan.kv_cache, plan.config.scheduler, enable_prefix_caching=caching, cost=costs[degree])

    search = FleetSearch(trace, slo, make_engine, options.max_engines)
    points = [point for degree in degrees for point in search.points(degree)]
    if options.plot is not None:
        save_curve(points, slo, options.plot)
    best = smallest(points)
    if options.json:
        print(json.dumps({"smallest": best and asdict(best), "curve": [asdict(point) for point in points]}))
    else:
        _print_table(points, options.percentile)
    if best is None:
        raise ConfigError(refusal(points, slo))
    if not options.json:
        print(f"smallest fleet: {best.engines} engines of degree {best.degree}")
    return 0


def _degrees(text: str) -> list[int]:
    try:
        degrees = sorted({int(part) for part in text.split(",")})
    except ValueError:
        degrees = []
    if not degrees or degrees[0] < 1:
        raise ConfigError(f"--degrees {text!r}: give numbers of at least 1, separated by commas")
    return degrees


def _print_table(points: list[FleetPoint], percentile: int) -> None:
    print(
        f"{'degree':>6} {'engines':>7} {f'p{percentile} ttft':>11} {f'p{percentile} itl':>11} "
        f"{'in limits':>9} {'busy':>6}"
    )
    for point in points:
        times = f"{point.ttft_s:>10.4g}s {1e3 * point.itl_s:>9.4g}ms"
        print(f"{point.degree:>6} {point.engines:>7} {times} {point.share:>9.1%} {point.busy:>6.1%}")
