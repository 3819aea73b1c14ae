"""A rank: computes its part of what rank 0 asks for.

Started as `python -m quire.runner.parallel.rank_process SOCKET MEMORY`, with two descriptors. It ends when rank 0
closes the socket, or ends itself.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.common import liveness
from quire.common.batch import Batch, decode
from quire.common.faults import fault_point
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.runner.parallel.configs import from_bytes
from quire.runner.parallel.messages import (
    TO_RANK,
    Connection,
    Done,
    DraftPass,
    LoadAdapter,
    Restart,
    Start,
    Step,
    ToRank,
    UnloadAdapter,
)
from quire.runner.parallel.sender import Sender

if TYPE_CHECKING:
    from quire import kernels
    from quire.runner.parallel.links import Links
    from quire.runner.worker import Worker


def serve(sock: socket.socket, memory: int, *, pins: bool = True) -> None:
    """Compute until rank 0 closes the socket. `pins`: whether this process may be bound to the rank's CPUs."""
    connection = Connection(sock)
    start = connection.receive(TO_RANK)
    if not isinstance(start, Start):
        return
    config, kv_cache = share_of(start)
    if pins and config.parallel.cpus:
        os.sched_setaffinity(0, config.parallel.cpus)  # before torch starts threads
    sender = Sender(connection, "rank")
    with sender.beating():
        from quire import kernels
        from quire.runner.worker import make_worker

        ranks = kernels.Ranks.join(config.parallel.shard(start.number), memory, start.slot_bytes)
        try:
            rank = Rank(sender, ranks, make_worker(config, kv_cache, ranks))
        except Exception as error:
            sender.send(sender.failure(error))
            sender.send(Done())
            connection.receive(TO_RANK)  # rank 0 closes the socket
            return
        sender.send(Done())
        while (message := connection.receive(TO_RANK)) is not None:
            rank.handle(message)


def share_of(start: Start) -> tuple[EngineConfig, KVCacheConfig]:
    """What the message says about the engine."""
    config, kv_cache = from_bytes(start.share)
    assert isinstance(config, EngineConfig)
    assert isinstance(kv_cache, KVCacheConfig)
    return config, kv_cache


class Rank:
    """Does what the messages say."""

    def __init__(self, sender: Sender, ranks: kernels.Ranks, worker: Worker, links: Links | None = None) -> None:
        """`links`: to the ranks of this machine which this one passes messages on to, and answers for."""
        self._sender, self._ranks, self._worker, self._links = sender, ranks, worker, links

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
                        self._sender.send(self._sender.failure(error))
            case Restart():
                self._send_failures()
                self._ranks.restart()
                self._sender.send(Done())
            case LoadAdapter() | UnloadAdapter():
                self._sender.change_adapters(message, self._worker)
                self._send_failures()
                self._sender.send(Done())
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

    def _send_failures(self) -> None:
        """Wait for the other ranks of this machine, and send what has failed there."""
        for failure in [] if self._links is None else self._links.wait():
            self._sender.send(failure)


def _was_stopped(error: Exception) -> bool:
    """Whether the failure is another rank's."""
    return isinstance(error, RuntimeError) and "stopped" in str(error)


def main(descriptor: int, memory: int) -> None:
    """Serve rank 0, whose socket has this file descriptor."""
    liveness.follow_parent()
    with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has ended
        serve(socket.socket(fileno=descriptor), memory)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
