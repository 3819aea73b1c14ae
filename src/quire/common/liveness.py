"""Child processes, which end with their parent, and signs of life between processes: progress of the kernels."""

import ctypes
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.common.errors import EngineBrokenError

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


def follow_parent() -> None:
    """Leave SIGINT and SIGTERM to the parent, which may finish its work first, and end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def start_child(
    module: str, arguments: Sequence[str], descriptors: Sequence[int], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run a module in a child process that inherits these descriptors. `variables` are added to the environment."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), **(variables or {})),
        start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone
    )


def end_of(process: subprocess.Popen[bytes], patience_s: float) -> str:
    """Wait for the end of a process whose socket was closed, and force it after this time. Returns what was the end."""
    try:
        status = process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Finalizer:
    """Ends what an object has started outside this process: when it is called, when the object is no longer used, or
    when Python ends, whichever is first. In a fork of this process it does nothing, since the parent still uses it."""

    def __init__(self, owner: object, end: Callable[..., object], *args: Any) -> None:
        """`end` is called with `args`, which must not refer to `owner`."""
        self._pid = os.getpid()
        self._finalize = weakref.finalize(owner, _end_unless_forked, self._pid, end, args)

    def check(self) -> None:
        """Raise EngineBrokenError in a fork, which would disturb what its parent has started."""
        if os.getpid() != self._pid:
            raise EngineBrokenError(
                f"this LLM belongs to process {self._pid}, which has made it: make another one in this process"
            )

    def __call__(self) -> None:
        self._finalize()


def _end_unless_forked(pid: int, end: Callable[..., object], args: Sequence[Any]) -> None:
    if os.getpid() == pid:
        end(*args)
