"""The command line. Each command is a module of its own, which is imported only when that command runs."""

import argparse
import atexit
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from itertools import takewhile

from quire.cli.arguments.parser import Parser
from quire.common.errors import QuireError, nearest_name
from quire.common.version import __version__

_COMMANDS = {
    "generate": "complete prompts, or answer them with the checkpoint's chat template",
    "chat": "talk with a model",
    "embed": "embed texts",
    "serve": "serve a model over HTTP, to clients of the OpenAI and Anthropic APIs",
    "run-batch": "run a file of requests through the server's endpoints",
    "top": "watch a running server's cache and queues",
    "plan": "show how memory would be used, without reading the weights",
    "models": "list the architectures that Quire runs",
    "doctor": "examine this machine: what Quire uses, what would be faster and how",
    "quantize": "save a checkpoint with quantized weights, which then load faster",
    "bench": "measure how fast a model runs on this machine",
    "simulate": "replay a trace of requests through the scheduler, without a model",
    "demo": "run a batch of prompts on the embedded checkpoint",
}
_FOLDERS = dict.fromkeys(("chat", "top"), "terminal.")
_EXIT_WRONG = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
_WRITE_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 with a line on standard error that says what is wrong."""
    if argv is None:  # the process ends with the command: examining all objects of torch then would take 0.4 s
        atexit.register(gc.freeze)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # a closed one is read as empty, or written to nowhere
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, because an exception at exit could not be caught
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        if error.errno == errno.EPIPE:  # the reader has gone away, as in `quire generate | head -1`
            return _EXIT_BROKEN_PIPE
        print(f"quire: the output cannot be written: {error.strerror}", file=sys.stderr)
        return _EXIT_WRONG


def _run(arguments: list[str]) -> int:
    parser, options = _parser(arguments), argparse.Namespace()
    try:
        options = parser.parse(arguments)
        return int(options.run(options))
    except QuireError as error:
        if hasattr(options, "debug"):
            raise
        print(f"quire: {' '.join(str(error).split())}", file=sys.stderr)
        return _EXIT_WRONG
    except KeyboardInterrupt:
        if hasattr(options, "debug"):
            raise
        return _EXIT_INTERRUPTED


def _parser(arguments: list[str]) -> Parser:
    """Return the parser of all commands, with the options of the one command that `arguments` names."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the Python traceback of an error"
    )
    parser = Parser(
        prog="quire",
        description="A small LLM inference and serving engine with a paged KV cache.",
        epilog="`quire COMMAND --help` explains a command.",
        parents=[shared],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    if chosen not in _COMMANDS:
        parser.check_options(takewhile(lambda argument: argument.startswith("-"), arguments))
        if chosen is not None:
            near = nearest_name(chosen, _COMMANDS)
            parser.error(f"unknown command {chosen!r}{near} (allowed: {', '.join(_COMMANDS)})")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            parents=[shared],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module = importlib.import_module(f"quire.cli.{_FOLDERS.get(name, '')}{name.replace('-', '_')}")
            command.description = module.__doc__
            module.add_arguments(command)
            parser.command = f" {name}"
            parser.takes_vllm_options = "--max-model-len" in command._option_string_actions
            command.set_defaults(run=module.run)
    return parser
