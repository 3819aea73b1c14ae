"""What a target of reliability.fuzz is, and what targets share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

JSON = b'" { } [ ] : , null true 1e400 -0 \\u0000 \\ud800 1.5 \xff 999999999999999999999999999999'.split()
"""pieces of its language"""


@dataclass(frozen=True)
class Target:
    """One parser."""

    run: Callable[[bytes], str]
    """What it says of an input: nothing if it took it, else why it refused it, as it promises to. Anything else that it
    raises, a broken promise (AssertionError), or too much time is a find"""
    corpus: Callable[[], list[bytes]]
    """what it takes, or nearly"""
    words: tuple[bytes, ...] = ()
    """pieces of its language"""


_folders: list[tempfile.TemporaryDirectory[str]] = []
"""live as long as the program"""


@cache
def folder(name: str) -> Path:
    """One of a target's own, empty at first."""
    _folders.append(tempfile.TemporaryDirectory(prefix=f"quire-fuzz-{name}-"))
    return Path(_folders[-1].name)


def scratch(data: bytes, name: str = "input") -> Path:
    """A file of that name which holds this."""
    path = folder("files") / name
    path.write_bytes(data)
    return path


def refusal(error: Exception, is_kept: bool = True, what: str = "") -> str:
    """Why the input was refused; AssertionError unless it was as promised."""
    assert is_kept, f"a refusal without {what}"
    return str(error) or type(error).__name__


def tried(parse: Callable[[], object], *errors: type[Exception]) -> None:
    """Whatever it takes or refuses, as those do who call it."""
    expected: tuple[type[Exception], ...] = (*errors, msgspec.MsgspecError, ValueError)
    with suppress(*expected):
        parse()
