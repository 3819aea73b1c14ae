"""Ctrl-C, delayed to the end of a step."""

import _signal  # type: ignore[import-not-found]  # signal's functions look every handler up as an enumeration: 10 µs
import signal
from contextlib import ContextDecorator


class interrupt_deferred(ContextDecorator):  # noqa: N801
    """Delays Ctrl-C until the end of the block, so that it does not interrupt a step. A second Ctrl-C is not delayed.
    One that has been delayed replaces an error that leaves the block.

    Does nothing outside the main thread, or if the program handles the signal itself. Not a generator, as
    `failures_named`: every step is in one.
    """

    def __enter__(self) -> None:
        self._interrupted, self._handler = False, None
        if (handler := _signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
            self._handler = handler
            try:
                _signal.signal(signal.SIGINT, self._remember)
            except ValueError:  # this is not the main thread
                self._handler = None

    def _remember(self, *_: object) -> None:
        self._interrupted = True
        _signal.signal(signal.SIGINT, self._handler)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
        if self._interrupted and (kind is None or issubclass(kind, Exception)):
            raise KeyboardInterrupt
