"""Serve a model over HTTP to clients of the OpenAI and Anthropic APIs; by default the embedded model.

A configuration file in YAML or TOML can set every option under the same name; an option on the command line takes
precedence. docs/operating.md explains how to run a server, and docs/configuration.md lists all options.
"""

from __future__ import annotations

import argparse
import dataclasses

from quire.cli.options import add_engine_arguments, add_field_arguments, add_model_argument, engine_kwargs
from quire.server.config import ServerArgs, merge_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model_argument(parser)
    parser.add_argument("--config", metavar="FILE", help="configuration file in YAML, or in TOML if it ends in .toml")
    add_field_arguments(parser, ServerArgs, "server")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, and return the exit status."""
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    flags = engine_kwargs(options) | {name: value for name, value in vars(options).items() if name in names}
    args, engine_args = merge_args(options.config, flags)
    from quire.server.serve import serve  # after the arguments are checked, because it loads the HTTP server

    return serve(args, engine_args)
