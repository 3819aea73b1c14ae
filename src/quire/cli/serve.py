"""Serve models over HTTP to clients of the OpenAI, Anthropic and Ollama APIs; by default the embedded model.

A configuration file in YAML or TOML can set every option under the same name; an option on the command line takes
precedence. docs/operating.md explains how to run a server, and docs/configuration.md lists all options.
"""

import argparse
import dataclasses

from quire.cli.arguments.options import add_engine_arguments, engine_kwargs
from quire.common.arguments.options import add_field_arguments
from quire.common.errors import ConfigError
from quire.config.args import EngineArgs
from quire.server.config import ServerArgs, merge_args
from quire.server.models.spec import ModelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    text = "folder, GGUF file, hub id, or NAME= before it to serve it as NAME; several are loaded when they are used"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    text = "another model, as above; may be repeated. `serve A --also B` is `serve A B`"
    parser.add_argument("--also", action="append", default=[], metavar="MODEL", help=text)
    parser.add_argument("--config", metavar="FILE", help="configuration file in YAML, or in TOML if it ends in .toml")
    add_field_arguments(parser, ServerArgs, "server")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, and return the exit status."""
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    flags = engine_kwargs(options) | {name: value for name, value in vars(options).items() if name in names}
    args, models = merge_args(options.config, flags, models_of(options))
    of_several = [spec.engine for spec in models if spec.engine.nnodes > 1]
    if of_several and len(models) > 1:
        raise ConfigError(
            f"nnodes={of_several[0].nnodes}: one model can run on several machines, and {len(models)} are given"
        )
    if of_several and of_several[0].node_rank > 0:
        from quire.runner.parallel.machines.node import run_node

        run_node(of_several[0])
    from quire.server.serve import serve  # after the arguments are checked, because it loads the HTTP server

    return serve(args, models)


def models_of(options: argparse.Namespace) -> list[str]:
    """The models that the command line names, in their order; none for that of the file, or the embedded one. Raises
    ConfigError for `--also` where it is unclear which model is the first."""
    embedded = ModelSpec((), EngineArgs()).checkpoint
    first: list[str] = options.models or [vars(options).get("model", embedded)] * bool(options.also)
    if options.also and options.config is not None and not options.models:
        raise ConfigError("--also: name the first model before it, as in `serve A --also B`, or put all into the file")
    return [*first, *options.also]
