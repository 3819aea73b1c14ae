"""Ctrl-C, delayed to the end of a step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, so that it does not interrupt a step. A second Ctrl-C is not delayed.

    Does nothing outside the main thread, or if the program handles the signal itself.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def remember(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, handler)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupted:
        raise KeyboardInterrupt
