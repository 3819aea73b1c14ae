"""The processes of the other ranks, as rank 0 has them: started, watched, ended."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quire.common import liveness
from quire.common.errors import EngineBrokenError
from quire.common.log import logger
from quire.runner.parallel.messages import FROM_RANK, Connection, Done, Failed, Message, Progress, to_frame

_TICK_S = 0.1
_BEAT_S = 1.0
_MAX_BEATS = 4096
PATIENCE_S = 120.0
"""How long rank 0 waits for a rank that makes no progress, before it gives the engine up. A server that has a shorter
hang_timeout_s ends the engine sooner."""
EXIT_S = 2.0
"""A rank ends when its socket is closed. After this time it is killed."""


class RankProcess(Protocol):
    """What computes a rank, in a process of its own or, in tests, in a thread."""

    def end(self, patience_s: float = EXIT_S) -> str:
        """Wait for its end, which its closed socket has asked for, and force it after this time. Returns what was the
        end."""


Launch = Callable[[socket.socket, int, int], RankProcess]
"""Starts a rank with its end of the socket, the descriptor of the shared memory, and one to which it writes a byte each
second, and which is closed at its end."""


def start_child(module: str, arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Run a module in a child process that inherits these descriptors."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        start_new_session=True,  # Ctrl-C in a terminal reaches rank 0 alone
    )


class ChildProcess:
    """A rank in a child process."""

    def __init__(self, sock: socket.socket, memory: int, lifeline: int) -> None:
        descriptors = [sock.fileno(), memory, lifeline]
        self._process = start_child("quire.runner.parallel.rank_process", [*map(str, descriptors)], descriptors)

    def end(self, patience_s: float = EXIT_S) -> str:
        """As RankProcess."""
        return end_of(self._process, patience_s)


def end_of(process: subprocess.Popen[bytes], patience_s: float = EXIT_S) -> str:
    """Wait for the end of a process whose socket was closed, and force it after this time. Returns what was the end."""
    try:
        status = process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Links:
    """All ranks of this machine but this one. A thread starts and watches them, since they end with the thread that
    started them."""

    def __init__(self, num_ranks: int, memory_bytes: int, launch: Launch = ChildProcess, first: int = 0) -> None:
        """Starts them. They share a file of zeros without a name, of which `memory` is the descriptor. `first`: the
        number of this one."""
        self._first = first
        self.memory = _unnamed_file(memory_bytes)
        self.lost: str | None = None
        """What has become of a rank that has ended by itself, or is silent."""
        self.when_lost: Callable[[], object] = lambda: None
        self._has_lost = threading.Event()
        self._stop, self._stopped = os.pipe()
        self._is_closing = threading.Event()
        self._connections: list[Connection] = []
        has_started = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, args=(num_ranks, launch, has_started), name="ranks", daemon=True
        )
        self._watcher.start()
        has_started.wait()

    def _watch(self, num_ranks: int, launch: Launch, has_started: threading.Event) -> None:
        """Start the ranks, report the first one that ends by itself or falls silent, and end them all."""
        processes, lifelines = list[RankProcess](), dict[int, int]()
        try:
            for rank in range(1, num_ranks):
                ours, its = socket.socketpair()
                ours.settimeout(PATIENCE_S)
                lifeline, held = os.pipe()
                self._connections.append(Connection(ours))
                lifelines[lifeline] = rank
                with its:
                    processes.append(launch(its, self.memory, held))
                os.close(held)
        except BaseException as error:  # in __init__, nobody could be told
            self.lost = f"rank {self._first + len(processes) + 1} could not be started: {error}"
        has_started.set()
        lost, how = self._await_loss(lifelines)
        if not self._is_closing.is_set():
            process = processes[lifelines[lost] - 1]
            self._report(lifelines[lost], how or process.end())
            if how:
                process.end(0.0)  # it would not notice that its socket is closed
        self._is_closing.wait()
        for connection in self._connections:
            connection.close()
        for process in processes:
            process.end()
        for descriptor in (self._stop, *lifelines):
            os.close(descriptor)
        os.close(self.memory)

    def _await_loss(self, lifelines: Iterable[int]) -> tuple[int, str]:
        """Wait until a rank ends, or falls silent after it has loaded. Returns its lifeline, and how long it has been
        silent if it may live; or what `close` has closed."""
        silent_s = dict[int, float]()
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._stop, *lifelines):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                began_s = time.monotonic()
                readable = [key.fd for key, _ in selector.select(_BEAT_S if silent_s else None)]
                passed_s = min(_BEAT_S, time.monotonic() - began_s)  # no longer: this process may have been stopped
                for descriptor in readable:
                    if descriptor == self._stop or not os.read(descriptor, _MAX_BEATS):
                        return descriptor, ""
                    silent_s[descriptor] = -passed_s
                for descriptor in silent_s:
                    silent_s[descriptor] += passed_s
                    if silent_s[descriptor] >= (limit_s := liveness.silence_s()):
                        return descriptor, f"was silent for {limit_s:g} s"

    def _report(self, rank: int, how: str) -> None:
        self.lost = f"rank {self._first + rank} {how}"
        logger.error("%s; without it this engine cannot go on", self.lost)
        self._has_lost.set()
        self.when_lost()
        if liveness.on_loss is not None:
            liveness.on_loss()

    def send(self, message: Message) -> None:
        """Send a message to all. Raises EngineBrokenError if one has ended."""
        frame = to_frame(message)
        for connection in self._connections:
            self._check()
            try:
                connection.send_frame(frame)
            except OSError as error:
                self._has_lost.wait(EXIT_S)
                raise EngineBrokenError(self.lost or f"a rank cannot be reached: {error}") from error

    def send_each(self, messages: Sequence[Message]) -> None:
        """Send each rank its own."""
        self._check()
        for connection, message in zip(self._connections, messages, strict=True):
            connection.send(message)

    def wait(self) -> list[Failed]:
        """Wait until all have answered. Returns what has failed before they were done.

        Raises EngineBrokenError if a rank ends, sends nonsense, or makes no progress for PATIENCE_S.
        """
        failures = []
        for rank, connection in enumerate(self._connections, start=self._first + 1):
            while not isinstance(answer := self._answer(rank, connection), Done):
                failures.append(answer)
        return failures

    def _answer(self, rank: int, connection: Connection) -> Done | Failed:
        waited_s = 0.0
        while waited_s < PATIENCE_S:
            self._check()
            if not connection.is_readable(_TICK_S):
                waited_s += _TICK_S
                continue
            try:
                message = connection.receive(FROM_RANK)
            except (OSError, ValueError) as error:
                raise EngineBrokenError(self.lost or f"rank {rank} sends nonsense: {error}") from error
            if message is None:
                self._has_lost.wait(EXIT_S)
                raise EngineBrokenError(self.lost or f"rank {rank} has closed its socket")
            if not isinstance(message, Progress):
                return message
            waited_s = 0.0
            liveness.num_kernel_events += 2
        raise EngineBrokenError(f"rank {rank} made no progress for {PATIENCE_S:g} s")

    def _check(self) -> None:
        if self.lost is not None:
            raise EngineBrokenError(self.lost)

    def close(self) -> None:
        """End all ranks, and wait for their end."""
        if not self._is_closing.is_set():
            self._is_closing.set()
            os.close(self._stopped)
            self._watcher.join()
            self.when_lost = lambda: None


def _unnamed_file(num_bytes: int) -> int:
    """The descriptor of a file of zeros in memory, which is gone when all have closed it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
