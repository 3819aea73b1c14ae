"""A rank: computes its part of what rank 0 asks for.

Started as `python -m quire.runner.parallel.rank_process SOCKET MEMORY LIFELINE`, with three descriptors. It ends when
rank 0 closes the socket, or ends itself.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from quire.common import liveness
from quire.common.batch import Batch, decode
from quire.common.errors import QuireError
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.runner.parallel.configs import from_bytes
from quire.runner.parallel.messages import (
    TO_RANK,
    Connection,
    Done,
    DraftPass,
    Failed,
    LoadAdapter,
    Message,
    Progress,
    Restart,
    Start,
    Step,
    ToRank,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from quire import kernels
    from quire.runner.parallel.links import Links
    from quire.runner.worker import Worker

_BEAT_S = 1.0
_PROGRESS_S = 0.5
_MIN_CPU_S = 0.01
"""Processor time between two messages of progress: a process that has used less is waiting for something."""


def serve(sock: socket.socket, memory: int, lifeline: int, *, pins: bool = True) -> None:
    """Compute until rank 0 closes the socket. `pins`: whether this process may be bound to the rank's CPUs."""
    connection = Connection(sock)
    start = connection.receive(TO_RANK)
    if not isinstance(start, Start):
        return
    config, kv_cache = share_of(start)
    if pins and config.parallel.cpus:
        os.sched_setaffinity(0, config.parallel.cpus)  # before torch starts threads
    has_loaded = threading.Event()
    threading.Thread(target=_show_progress, args=(connection, has_loaded), daemon=True).start()
    from quire import kernels
    from quire.runner.worker import make_worker

    ranks = kernels.Ranks.join(config.parallel.shard(start.rank), memory, start.slot_bytes)
    try:
        rank = Rank(connection, ranks, make_worker(config, kv_cache, ranks))
    except Exception as error:
        _log(error)
        connection.send(Failed(type(error).__name__, str(error)))
        connection.send(Done())
        connection.receive(TO_RANK)  # rank 0 closes the socket
        return
    finally:
        has_loaded.set()
    has_ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(lifeline, has_ended), daemon=True)
    os.write(lifeline, b".")  # from now on rank 0 waits for the next one
    beating.start()
    try:
        connection.send(Done())
        while (message := connection.receive(TO_RANK)) is not None:
            rank.handle(message)
    finally:
        has_ended.set()
        beating.join()


def share_of(start: Start) -> tuple[EngineConfig, KVCacheConfig]:
    """What the message says about the engine."""
    config, kv_cache = from_bytes(start.share)
    assert isinstance(config, EngineConfig)
    assert isinstance(kv_cache, KVCacheConfig)
    return config, kv_cache


def _show_progress(connection: Connection, has_loaded: threading.Event) -> None:
    """Tell rank 0 now and then that this process is loading, as long as it uses its CPU."""
    used_s = time.process_time()
    with suppress(OSError):  # rank 0 has ended
        while not has_loaded.wait(_PROGRESS_S):
            before_s, used_s = used_s, time.process_time()
            if used_s - before_s > _MIN_CPU_S:
                connection.send(Progress())


def _beat(lifeline: int, has_ended: threading.Event) -> None:
    """Show rank 0 once a second that this process lives, also while nothing runs."""
    with suppress(BrokenPipeError):  # rank 0 has ended
        while not has_ended.wait(_BEAT_S):
            os.write(lifeline, b".")


class Sender(Protocol):
    """Where answers go."""

    def send(self, message: Message) -> None:
        """Send a message."""


class Rank:
    """Does what the messages say."""

    def __init__(self, sender: Sender, ranks: kernels.Ranks, worker: Worker, links: Links | None = None) -> None:
        """`links`: to the ranks of this machine which this one passes messages on to, and answers for."""
        self._connection, self._ranks, self._worker, self._links = sender, ranks, worker, links

    def handle(self, message: ToRank) -> None:
        """Compute, or answer. A failure stops all ranks: rank 0 then lets them begin anew."""
        if self._links is not None:
            self._links.send(message)
        match message:
            case Step() | DraftPass():
                try:
                    self._compute(message)
                except Exception as error:
                    self._ranks.stop()
                    if not _was_stopped(error):
                        _log(error)
                        self._connection.send(Failed(type(error).__name__, str(error)))
            case Restart():
                self._send_failures()
                self._ranks.restart()
                self._connection.send(Done())
            case LoadAdapter() | UnloadAdapter():
                self._answer(message)
            case Start():
                raise ValueError("a rank starts once")

    def _compute(self, message: Step | DraftPass) -> None:
        self._ranks.begin()
        fault_point("rank.step")
        batch = decode(message.batch, Batch)
        if isinstance(message, Step):
            self._worker.follow(batch, message.states)
        else:
            self._worker.follow_draft(batch.sequences, message.rows, is_first=message.is_first)

    def _answer(self, message: LoadAdapter | UnloadAdapter) -> None:
        try:
            if isinstance(message, LoadAdapter):
                self._worker.load_adapter(message.slot, message.folder, message.digest)
            else:
                self._worker.unload_adapter(message.slot)
        except Exception as error:
            _log(error)
            self._connection.send(Failed(type(error).__name__, str(error)))
        self._send_failures()
        self._connection.send(Done())

    def _send_failures(self) -> None:
        """Wait for the other ranks of this machine, and send what has failed there."""
        for failure in [] if self._links is None else self._links.wait():
            self._connection.send(failure)


def _was_stopped(error: Exception) -> bool:
    """Whether the failure is another rank's."""
    return isinstance(error, RuntimeError) and "stopped" in str(error)


def _log(error: Exception) -> None:
    if not isinstance(error, QuireError):
        logger.exception("a rank failed")


def main(descriptor: int, memory: int, lifeline: int) -> None:
    """Serve rank 0, whose socket has this file descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles them
        signal.signal(number, signal.SIG_IGN)
    liveness.end_with_parent()
    with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has ended
        serve(socket.socket(fileno=descriptor), memory, lifeline)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
