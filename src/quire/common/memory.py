"""When memory is examined for garbage, and when free memory goes back to the system.

glibc's allocator has an arena for each thread and keeps free memory below the highest address still in use. After a
burst of long texts or templates, a process would otherwise stay several times as large as before.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

IDLE_S = 1.0
"""Seconds without work after which memory is returned."""


def _find_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    return trim


_trim = _find_trim()


def give_back_memory() -> None:
    """Return free memory to the system, in 2 ms (25 ms for 250 MB). Does nothing unless the allocator is glibc's."""
    if _trim is not None:
        _trim(0)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's search for cyclic garbage while many objects and no garbage are made, as by imports of modules.

    Torch makes 200,000 objects; examining them again and again takes a sixth of the time of its import. Afterwards all
    objects belong to the oldest generation, unless the program has frozen some. Does nothing where the search is off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()  # both together move objects to the oldest generation without examining them
            gc.unfreeze()
        gc.enable()
