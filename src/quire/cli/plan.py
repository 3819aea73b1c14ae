"""Show how memory would be used (weights, activations, KV cache) and what fits into the cache. Reads no weights."""

import argparse
import json

from quire.cli.arguments.options import add_engine_arguments, engine_kwargs
from quire.config.args import EngineArgs
from quire.config.checkpoint.draft_heads import has_mtp_layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model MODEL"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the memory plan."""
    from quire.runner.memory_plan import plan_memory  # loads torch

    plan = plan_memory(EngineArgs(**engine_kwargs(options)))
    has_unused = plan.config.draft is None and has_mtp_layer(plan.config.model)
    if options.json:
        print(json.dumps(plan.to_dict() | {"has_unused_mtp_layer": has_unused}))
        return 0
    print(plan)
    if has_unused:
        print(
            """unused      a layer for multi-token prediction, to draft by --speculative-config '{"method": "mtp"}'"""
        )
    return 0
