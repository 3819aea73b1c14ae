"""The first rank of a machine besides machine 0: computes its part, and passes messages on to its machine's others.

Started as `python -m quire.runner.parallel.machines.machine_process SOCKET WIRE OWN`: descriptors of the connections
for messages and for what ranks gather, and what this machine decides by itself. It ends when the engine's process
closes them, or ends itself.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack, suppress

import msgspec

from quire.common import liveness
from quire.common.errors import EngineBrokenError
from quire.runner.parallel.links import ChildProcess, LaunchRank
from quire.runner.parallel.machines.node import Own, on_this_machine
from quire.runner.parallel.messages import TO_RANK, Connection, Done, Start
from quire.runner.parallel.pipeline.messages import StageReady
from quire.runner.parallel.rank_process import Rank, share_of
from quire.runner.parallel.sender import Sender


def serve(
    sock: socket.socket, wire: socket.socket, own: Own, launch: LaunchRank = ChildProcess, *, pins: bool = True
) -> None:
    """Compute until the engine's process closes the socket. `pins`: whether this process may be bound to CPUs."""
    connection = Connection(sock)
    sender = Sender(connection, "rank", own)
    start = connection.receive(TO_RANK)
    if not isinstance(start, Start):
        return
    liveness.hang_timeout_s = start.hang_timeout_s
    if pins and own.cpus:
        os.sched_setaffinity(0, own.cpus)  # before torch starts threads
    with sender.beating():
        _compute(start, own, connection, sender, wire, launch)


def _compute(
    start: Start, own: Own, connection: Connection, sender: Sender, wire: socket.socket, launch: LaunchRank
) -> None:
    from quire import kernels
    from quire.runner.parallel.own_ranks import OwnRanks

    ranks = None
    with ExitStack() as stack:
        try:
            config, kv_cache = share_of(start)
            config = on_this_machine(config, kv_cache, own)
            count = config.parallel.tensor_parallel_size // own.num_machines
            ranks = OwnRanks(config, count, first=start.number, launch=launch)
            stack.callback(ranks.close)
            ranks.load(kv_cache, [wire.fileno()])
            failures = ranks.links.wait()
        except Exception as error:
            failures = [sender.failure(error)]
        for message in (*failures, StageReady(kernels.isa()), Done()):
            sender.send(message)
        if ranks is None or failures:
            connection.receive(TO_RANK)  # the engine's process closes the socket
            return
        rank = Rank(sender, ranks.ranks, ranks.worker, ranks.links)
        while (asked := connection.receive(TO_RANK)) is not None:
            rank.handle(asked)


def main(descriptor: int, wire: int, own: Own) -> None:
    """Serve the engine's process, whose connections have these file descriptors."""
    liveness.follow_parent()
    sock = socket.socket(fileno=descriptor)
    liveness.on_loss = lambda: sock.shutdown(socket.SHUT_RDWR)
    # The engine's process, the link, or another rank of this machine has ended.
    with suppress(BrokenPipeError, ConnectionResetError, TimeoutError, EngineBrokenError):
        serve(sock, socket.socket(fileno=wire), own)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Own))
