"""The fork server: `python -m tests.forks.server LISTENER PATH`. It ends when its standard input does."""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys

from quire.common import faults
from tests.forks import ForkServer, use
from tests.forks.wire import Request, receive, send_number

PRELOADED = ["quire.engine.llm_engine", "quire.runner.worker", "quire.server.serve", "quire.cli.serve", "uvicorn"]
_FIRST_FREE = 200
"""What a fork inherits has lower numbers; what it is given is moved here while those are closed."""


class _Listening:
    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._ended, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """by process: who has asked for it, and where its status is to be sent"""
        for what in (listener, self._ended, sys.stdin):
            self._selector.register(what, selectors.EVENT_READ)

    def next_fork(self) -> tuple[Request, list[int]] | None:
        """Returns in each fork what it has to run with which descriptors; in the fork server None, at the end."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._ended in ready:
                os.read(self._ended, 1024)
                self._reap()
            if self._listener in ready:
                found = self._answer(self._listener.accept()[0])
                if found is not None:
                    return found
            if sys.stdin in ready:
                return None

    def _answer(self, connection: socket.socket) -> tuple[Request, list[int]] | None:
        """If the process that asks has ended by now, what it has asked for is ended too."""
        try:
            message, descriptors = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        if isinstance(message, int):
            found = [pid for pid, (asked, _) in self._running.items() if asked == message]
            with connection, contextlib.suppress(BrokenPipeError):
                connection.sendall(json.dumps(found).encode())
            return None
        (asking,) = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4])
        pid = os.fork()
        if not pid:
            return message, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        self._running[pid] = asking, connection
        try:
            send_number(connection, pid)
        except OSError:
            os.kill(pid, signal.SIGTERM)
        return None

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._running.pop(pid)[1] as connection, contextlib.suppress(OSError):
                send_number(connection, status)


def _become(request: Request, descriptors: list[int]) -> None:
    """Make this process what the request asks for, but for running it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request.is_new_session:
        os.setsid()
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE) for descriptor in descriptors]
    os.closerange(0, _FIRST_FREE)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv = [request.module, *request.arguments]
    _arm_faults()


def _arm_faults() -> None:
    """As a process of its own does when it imports the modules that this one has imported already."""
    faults._arm_from_environment(os.environ.get("QUIRE_FAULTS"))
    if faults._refuse_memory is not None:
        faults.arm_native(faults._refuse_memory)


def main() -> None:
    descriptor, path = sys.argv[1:]
    use(ForkServer(path, dict(os.environ)))
    for name in PRELOADED:
        importlib.import_module(name)
    listening = _Listening(socket.socket(fileno=int(descriptor)))
    gc.collect()
    gc.freeze()  # also, nothing that forks inherit is collected in them, when its descriptors are those of others
    fork = listening.next_fork()
    if fork is not None:
        _become(*fork)
        runpy.run_module(fork[0].module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
