"""The process that forks engines of tests outlives those who ask it for something."""

import os
import signal
import socket

import pytest

from tests import forks
from tests.forks.wire import Request, send


@pytest.mark.parametrize("asks_for", ["nothing", "children", "a fork"])
def test_who_asks_may_end_before_the_answer(asks_for: str) -> None:
    server = forks._server
    assert isinstance(server, forks._OwnServer)
    path = server.ready()
    assert server._process is not None
    request = Request("tests.forks.wire", [], dict(os.environ), os.getcwd(), [], False)
    forks.children_of(os.getpid())  # it has been loaded
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        if asks_for == "nothing":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
        else:
            send(path, request if asks_for == "a fork" else os.getpid()).close()
    finally:
        os.kill(server._process.pid, signal.SIGCONT)
    assert isinstance(forks.children_of(os.getpid()), list)
    assert server._process.poll() is None


def test_descriptors_of_who_ends_while_asking_are_closed() -> None:
    server = forks._server
    assert isinstance(server, forks._OwnServer)
    reads, writes = os.pipe()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.ready())
        socket.send_fds(connection, [b"."], [writes])
    os.close(writes)
    forks.children_of(os.getpid())  # the fork server has gone on
    os.set_blocking(reads, False)
    assert os.read(reads, 1) == b""  # BlockingIOError if the other end is still open
    os.close(reads)
