"""What tells processes of each other's life: how far the kernels are, and that nobody outlives whom it works for."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

num_kernel_events = 0
"""beginnings and ends of kernel calls in this process. While it grows, a long step gets on; while it is odd, a kernel
is at work"""


def end_with_parent() -> None:
    """Have the system kill this process as soon as the thread that started it ends, also where this one is stopped or
    hangs. Only Linux does: elsewhere the end of a socket or pipe has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
