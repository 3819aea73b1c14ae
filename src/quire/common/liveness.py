"""Signs of life between processes: progress of the kernels, and child processes that end with their parent."""

import ctypes
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

num_kernel_events = 0
"""Number of starts and ends of kernel calls in this process. While it grows, a long step is making progress; while it
is odd, a kernel is running."""

hang_timeout_s: float | None = None
"""After how long without progress this process is ended, if it is a server's engine; None for never."""

SILENCE_S = 10.0
"""How long at most nothing may come from a rank or a stage that has loaded. It shows every second that it lives, also
while it computes."""
_LEAST_SILENCE_S = 3.0

on_loss: Callable[[], object] | None = None
"""What is called, in some thread, when a process without which this one cannot go on has ended; None for nothing."""


def silence_s() -> float:
    """SILENCE_S, or a shorter time after which an engine without progress is ended."""
    return min(SILENCE_S, max(_LEAST_SILENCE_S, hang_timeout_s or SILENCE_S))


def end_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends, even if this process is stopped or hangs.

    This works on Linux only. On other systems the process ends when it notices that a socket or pipe was closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
