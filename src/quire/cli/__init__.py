"""The command line. Each command lives in a module of its own, imported only when it is the one asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from quire.common.errors import QuireError
from quire.common.version import __version__

_COMMANDS = {
    "generate": "complete prompts, or answer them with the checkpoint's chat template",
    "chat": "talk with a model",
    "serve": "serve a model over HTTP, to clients of the OpenAI and Anthropic APIs",
    "run-batch": "run a file of requests through the server's endpoints",
    "top": "watch a running server's cache and queues",
    "plan": "show how the memory would be used, without reading weights",
    "quantize": "save a checkpoint with quantized weights, which then only need mapping",
    "bench": "measure how fast a model runs on this machine",
    "simulate": "replay a trace through the scheduler, without a model",
    "demo": "run a batch of prompts on the embedded checkpoint",
}
_EXIT_WRONG = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, or 2 with one line on standard error where something was wrong."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # now, and not at exit, where nobody could catch what it raises
    except BrokenPipeError:  # nobody reads on, as in `quire generate | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    options = _parser(arguments).parse_args(arguments)
    try:
        return int(options.run(options))
    except QuireError as error:
        if options.debug:
            raise
        print(f"quire: {' '.join(str(error).split())}", file=sys.stderr)
        return _EXIT_WRONG
    except KeyboardInterrupt:
        if options.debug:
            raise
        return _EXIT_INTERRUPTED


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the one that `arguments` name."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the Python traceback of an error"
    )
    parser = argparse.ArgumentParser(
        prog="quire",
        description="A small LLM inference engine around a paged KV cache.",
        epilog="`quire COMMAND --help` explains a command.",
        parents=[shared],
        allow_abbrev=False,
    )
    parser.set_defaults(debug=False)
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            parents=[shared],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module = importlib.import_module(f"quire.cli.{name.replace('-', '_')}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
