"""Ctrl-C, delayed to the end of a step."""

import _signal  # type: ignore[import-not-found]  # signal's functions look every handler up as an enumeration: 10 µs
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, so that it does not interrupt a step. A second Ctrl-C is not delayed.

    Does nothing outside the main thread, or if the program handles the signal itself.
    """
    handler = _signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def remember(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        _signal.signal(signal.SIGINT, handler)

    _signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, handler)
    if interrupted:
        raise KeyboardInterrupt
