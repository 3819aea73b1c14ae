"""How fast the cores read weights, measured in a few milliseconds."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_PIECE_BYTES = 4 * 2**20
_LEAST_BYTES = 16 * 2**20
"""Less than this may come from the caches although all weights together do not."""
_BUDGET_S, _PATIENCE_S = 0.006, 0.012
_WINDOW_S = 0.002
"""Long enough that starting the threads does not count, and short enough that one undisturbed window is found."""


def reading_rate(native: Any, weights: Sequence[Tensor]) -> float | None:
    """As Backend.reading_rate.

    What is read in the first milliseconds is read again and timed: pages of a file are mapped then. The best window
    counts, since other programs disturb the others. None too if the first time takes so long that a disk is read.
    """
    pieces = [
        (weight.data_ptr() + start, min(_PIECE_BYTES, weight.nbytes - start))
        for weight in weights
        for start in range(0, weight.nbytes, _PIECE_BYTES)
    ]
    known, num_bytes, start_s = 0, 0, time.perf_counter()
    while known < len(pieces):
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= (_BUDGET_S if num_bytes >= _LEAST_BYTES else _PATIENCE_S):
            break
        native.read_memory(*pieces[known])
        num_bytes += pieces[known][1]
        known += 1
    return None if num_bytes < _LEAST_BYTES else _best_window(native, pieces[:known])


def _best_window(native: Any, pieces: Sequence[tuple[int, int]]) -> float:
    """The bytes per second of the fastest of a few windows of time, which together end soon after the budget."""
    place, num_bytes, best = 0, 0, 0.0
    now_s = start_s = first_s = time.perf_counter()
    while now_s - first_s < _BUDGET_S or not best:
        native.read_memory(*pieces[place])
        num_bytes += pieces[place][1]
        place, now_s = (place + 1) % len(pieces), time.perf_counter()
        if now_s - start_s >= _WINDOW_S:
            best = max(best, num_bytes / (now_s - start_s))
            start_s, num_bytes = now_s, 0
    return best
