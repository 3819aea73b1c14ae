"""The parser of the command line: errors of one line, which suggest the nearest name, and vLLM's options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

from quire.common.arguments.vllm_arguments import spelt_out, take_options
from quire.common.errors import nearest_name

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors do not repeat the usage, which is 65 lines for some commands."""

    takes_vllm_options = False
    """Whether a command has the engine's arguments, so that vLLM's may be given too."""
    command = ""
    """The command that is given, whose options errors are about."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a line that says what is wrong."""
        self.exit(2, f"{self.prog}: {message} (`{self.prog}{self.command} --help` lists the options)\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """As argparse does, but raises the OSError if standard output cannot be written."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse a command line. An option may have underscores instead of hyphens, as in vLLM.

        Options that only vLLM has are in the attribute `vllm_arguments` of the result.
        """
        given = spelt_out(arguments, set(self._known())) if self.takes_vllm_options else arguments
        rest = [_hyphenated(argument) for argument in given]
        others = take_options(rest, set(self._known())) if self.takes_vllm_options else {}
        options, unknown = self.parse_known_args(rest)
        options.vllm_arguments = others
        self.check_options(unknown[:1])
        if unknown:
            hint = ": a prompt comes after --prompt, a model after --model" if "prompt" in options else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return options

    def check_options(self, arguments: Iterable[str]) -> None:
        """Exit with an error that names the first option that neither this parser nor one of its commands has."""
        known = set(self._known())
        for argument in arguments:
            name = _hyphenated(argument).partition("=")[0]
            if name.startswith("-") and name not in known:
                self.error(f"unknown option {name!r}{nearest_name(name, known)}")

    def _known(self) -> Iterator[str]:
        """All options of this parser and its commands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._known()


def _hyphenated(argument: str) -> str:
    name, equals, value = argument.partition("=")
    is_option = name.startswith("--") and " " not in name  # else a text, as argparse takes it
    return name.replace("_", "-") + equals + value if is_option else argument
