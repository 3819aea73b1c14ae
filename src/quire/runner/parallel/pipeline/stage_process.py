"""A stage before the engine's own: computes its layers, and gives what it has computed to the next stage.

Started as `python -m quire.runner.parallel.pipeline.stage_process SOCKET [OWN]`, with a descriptor, and on a machine
that has joined another one with what it decides by itself. It ends when the engine's process closes the socket, or ends
itself.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from quire.common import liveness
from quire.common.batch import Batch, decode
from quire.common.faults import fault_point
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.runner.parallel.machines.node import Own, on_this_machine
from quire.runner.parallel.messages import Connection, Done, LoadAdapter, Start, UnloadAdapter
from quire.runner.parallel.pipeline.messages import (
    TO_STAGE,
    StageReady,
    StageStep,
    States,
    StepFailed,
    ToStage,
)
from quire.runner.parallel.rank_process import share_of
from quire.runner.parallel.sender import Sender

if TYPE_CHECKING:
    from quire.runner.parallel.pipeline.executor import StageExecutor


def serve(sock: socket.socket, own: Own | None = None, *, pins: bool = True) -> None:
    """Compute until the engine's process closes the socket, with the config that it sends, or the parts of it that are
    this machine's `own`. `pins`: whether this process may be bound to the stage's CPUs."""
    connection = Connection(sock)
    sender = Sender(connection, "stage", own)
    start = connection.receive(TO_STAGE)
    if not isinstance(start, Start):
        return
    liveness.hang_timeout_s = start.hang_timeout_s
    config, kv_cache = share_of(start)
    cpus = config.parallel.cpus if own is None else own.cpus
    if pins and cpus:
        os.sched_setaffinity(0, cpus)  # before torch starts threads
    with sender.beating():
        _compute(start.number, (config, kv_cache, own), connection, sender)


def _compute(
    number: int, share: tuple[EngineConfig, KVCacheConfig, Own | None], connection: Connection, sender: Sender
) -> None:
    from quire import kernels
    from quire.runner.executor import make_stage

    config, kv_cache, own = share
    try:
        if own is not None:
            config = on_this_machine(config, kv_cache, own)
        executor = make_stage(config, kv_cache)
    except Exception as error:
        sender.send(sender.failure(error))
        sender.send(Done())
        connection.receive(TO_STAGE)  # the engine's process closes the socket
        return
    try:
        sender.send(StageReady(kernels.isa()))
        sender.send(Done())
        stage = Stage(number, executor, sender, config.model.dtype)
        next_one = partial(connection.receive, TO_STAGE)
        messages: Iterator[ToStage] = _arriving(connection) if number else iter(next_one, None)
        for message in messages:
            stage.handle(message)
    finally:
        executor.close()


def _arriving(connection: Connection) -> Iterator[ToStage]:
    """Yield all messages, which a thread reads, also while the last one is still handled: the states of steps that
    follow may be more than a link holds, and one that takes nothing for `nodes._UNREACHABLE_S` is lost."""
    arrived = SimpleQueue[ToStage | Exception | None]()

    def read() -> None:
        try:
            while (message := connection.receive(TO_STAGE)) is not None:
                arrived.put(message)
            arrived.put(None)
        except Exception as error:  # raised where messages are handled
            arrived.put(error)

    threading.Thread(target=read, name="arriving", daemon=True).start()
    while (message := arrived.get()) is not None:
        if isinstance(message, Exception):
            raise message
        yield message


class Stage:
    """Does what the messages say."""

    def __init__(self, number: int, executor: StageExecutor, sender: Sender, dtype: str) -> None:
        self._is_first, self._executor, self._sender, self._dtype = number == 0, executor, sender, dtype
        self._waiting: dict[int, Batch] = {}  # steps whose states have not come yet

    def handle(self, message: ToStage) -> None:
        """Compute, or answer. A step has one outcome, which is sent: States, or StepFailed."""
        match message:
            case StageStep(number=number):
                self._waiting[number] = decode(message.batch, Batch)
                if self._is_first:
                    self._step(States(number, 0, "", []))
            case States():
                self._step(message)
            case StepFailed(number=number):
                del self._waiting[number]
                self._sender.send(message)
            case LoadAdapter() | UnloadAdapter():
                self._sender.change_adapters(message, self._executor)
                self._sender.send(Done())
            case Start():
                raise ValueError("a stage starts once")

    def _step(self, given: States) -> None:
        batch = self._waiting.pop(given.number)
        try:
            fault_point("stage.step")
            self._executor.execute(batch, given.tensors)
            tensors = [memoryview(each) for each in self._executor.states()]
        except Exception as error:
            failure = self._sender.failure(error)
            self._sender.send(StepFailed(given.number, failure.kind, failure.text))
            return
        self._sender.send(States(given.number, batch.num_tokens, self._dtype, tensors))


def main(descriptor: int, own: Own | None) -> None:
    """Serve the engine's process, whose socket has this file descriptor."""
    liveness.follow_parent()
    sock = socket.socket(fileno=descriptor)
    liveness.on_loss = lambda: sock.shutdown(socket.SHUT_RDWR)  # a rank of this stage has ended
    with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # the engine's process or the link has ended
        serve(sock, own)


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Own) if len(sys.argv) > 2 else None)
