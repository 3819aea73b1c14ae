"""Serve a model over HTTP, to clients of the OpenAI and Anthropic APIs; the embedded one if none is named.

All options can stand in a configuration file too, in YAML or TOML, under the same names; an option given here counts
before the file's. docs/operating.md tells how to run a server, docs/configuration.md has all options in tables.
"""

from __future__ import annotations

import argparse
import dataclasses

from quire.cli.options import add_engine_arguments, add_field_arguments, engine_kwargs
from quire.common.errors import ConfigError
from quire.server.config import ServerArgs, merge_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--config", metavar="FILE", help="configuration file, YAML or TOML (by its name's .toml)")
    add_field_arguments(parser, ServerArgs, "server")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; its exit status."""
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    flags = engine_kwargs(options) | {name: value for name, value in vars(options).items() if name in names}
    if options.served_model is not None and flags.setdefault("model", options.served_model) != options.served_model:
        raise ConfigError(f"two models are named, {options.served_model!r} and {flags['model']!r}: give one")
    args, engine_args = merge_args(options.config, flags)
    from quire.server.serve import serve  # loads the HTTP server, so not before the arguments are right

    return serve(args, engine_args)
