"""The type of reliability.fuzz's targets, and functions that they share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

JSON = b'" { } [ ] : , null true 1e400 -0 \\u0000 \\ud800 1.5 \xff 999999999999999999999999999999'.split()
"""Fragments of JSON to insert into inputs."""


@dataclass(frozen=True)
class Target:
    """One parser to fuzz."""

    run: Callable[[bytes], str]
    """Runs the parser on an input. Returns an empty text if it accepts it, else the documented reason for rejecting it.
    Any other exception, a broken promise (AssertionError) or too much time is a failure."""
    corpus: Callable[[], list[bytes]]
    """Returns valid inputs, and some that are almost valid."""
    words: tuple[bytes, ...] = ()
    """Fragments of the input's language to insert."""


_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that are deleted when the program ends."""


@cache
def folder(name: str) -> Path:
    """Return a folder for one target, which is empty at first."""
    _folders.append(tempfile.TemporaryDirectory(prefix=f"quire-fuzz-{name}-"))
    return Path(_folders[-1].name)


def scratch(data: bytes, name: str = "input") -> Path:
    """Write the data to a file of this name and return its path."""
    path = folder("files") / name
    path.write_bytes(data)
    return path


def refusal(error: Exception, is_kept: bool = True, what: str = "") -> str:
    """Return why the input was rejected. Raises AssertionError unless the error is as documented (`is_kept`)."""
    assert is_kept, f"an error without {what}"
    return str(error) or type(error).__name__


def tried(parse: Callable[[], object], *errors: type[Exception]) -> None:
    """Call a parser and ignore the errors that its callers handle."""
    expected: tuple[type[Exception], ...] = (*errors, msgspec.MsgspecError, ValueError)
    with suppress(*expected):
        parse()
