"""Standard error that is a terminal, or a pipe, and what was written there."""

import os
import pty
import re
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Written:
    """The text so far, which is complete when the block has ended."""

    def __init__(self) -> None:
        self.data = b""
        self._changed = threading.Condition()

    def add(self, data: bytes) -> None:
        with self._changed:
            self.data += data
            self._changed.notify_all()

    def wait_for(self, pattern: str) -> None:
        """Wait until the text contains the regular expression."""
        with self._changed:
            assert self._changed.wait_for(lambda: re.search(pattern, self.text), timeout=60), self.text

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@contextmanager
def reading(*, is_terminal: bool) -> Iterator[tuple[int, Written]]:
    """A descriptor to write to, and what was written."""
    source, target = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        termios.tcsetwinsize(target, (24, 150))
    written = Written()

    def read() -> None:
        try:
            while data := os.read(source, 65536):
                written.add(data)
        except OSError:  # how Linux reports that a terminal has no other end any more
            pass

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield target, written
    finally:
        os.close(target)
        thread.join()
        os.close(source)


@contextmanager
def standard_error(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> Iterator[Written]:
    """This process's standard error, while the block runs."""
    with (
        reading(is_terminal=is_terminal) as (target, written),
        open(target, "w", closefd=False) as stream,
        monkeypatch.context() as patch,
    ):
        patch.setattr("sys.stderr", stream)
        yield written
