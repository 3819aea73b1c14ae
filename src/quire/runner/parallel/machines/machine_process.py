"""The first rank of a machine besides machine 0: computes its part, and passes messages on to its machine's others.

Started as `python -m quire.runner.parallel.machines.machine_process SOCKET WIRE OWN`: descriptors of the connections
for messages and for what ranks gather, and what this machine decides by itself. It ends when the engine's process
closes them, or ends itself.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import msgspec

from quire.common import liveness
from quire.common.errors import EngineBrokenError, QuireError
from quire.common.log import logger
from quire.runner.parallel.links import ChildProcess, Launch
from quire.runner.parallel.machines.node import Own, on_this_machine
from quire.runner.parallel.messages import TO_RANK, Connection, Done, Failed, Start
from quire.runner.parallel.pipeline.messages import StageReady
from quire.runner.parallel.pipeline.stage_process import Sender, beat
from quire.runner.parallel.rank_process import Rank, share_of


def serve(
    sock: socket.socket, wire: socket.socket, own: Own, launch: Launch = ChildProcess, *, pins: bool = True
) -> None:
    """Compute until the engine's process closes the socket. `pins`: whether this process may be bound to CPUs."""
    connection = Connection(sock)
    sender, has_ended = Sender(connection, own), threading.Event()
    start = connection.receive(TO_RANK)
    if not isinstance(start, Start):
        return
    liveness.hang_timeout_s = start.hang_timeout_s
    if pins and own.cpus:
        os.sched_setaffinity(0, own.cpus)  # before torch starts threads
    threading.Thread(target=beat, args=(sender, has_ended), daemon=True).start()
    try:
        _compute(start, own, connection, sender, wire, launch)
    finally:
        has_ended.set()


def _compute(
    start: Start, own: Own, connection: Connection, sender: Sender, wire: socket.socket, launch: Launch
) -> None:
    from quire import kernels
    from quire.runner.parallel.own_ranks import OwnRanks

    made = None
    try:
        try:
            config, kv_cache = share_of(start)
            config = on_this_machine(config, kv_cache, own)
            count = config.parallel.tensor_parallel_size // own.num_machines
            made = OwnRanks(config, count, first=start.rank, launch=launch)
            made.load(kv_cache, [wire.fileno()])
            failures = made.links.wait()
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("a rank failed")
            failures = [Failed(type(error).__name__, str(error))]
        for message in (*failures, StageReady(kernels.isa()), Done()):
            sender.send(message)
        if made is None or failures:
            connection.receive(TO_RANK)  # the engine's process closes the socket
            return
        rank = Rank(sender, made.ranks, made.worker, made.links)
        while (asked := connection.receive(TO_RANK)) is not None:
            rank.handle(asked)
    finally:
        if made is not None:
            made.links.close()


def main(descriptor: int, wire: int, own: Own) -> None:
    """Serve the engine's process, whose connections have these file descriptors."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine's process handles them
        signal.signal(number, signal.SIG_IGN)
    liveness.end_with_parent()
    sock = socket.socket(fileno=descriptor)
    liveness.on_loss = lambda: sock.shutdown(socket.SHUT_RDWR)
    # The engine's process, the link, or another rank of this machine has ended.
    with suppress(BrokenPipeError, ConnectionResetError, TimeoutError, EngineBrokenError):
        serve(sock, socket.socket(fileno=wire), own)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Own))
