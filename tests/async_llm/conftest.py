"""Engines of these tests cannot run ahead: they block once a few messages to this process have not been read."""

import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from quire.interfaces.launch import link


@pytest.fixture(scope="package", autouse=True)
def engines_that_wait_for_their_reader() -> Iterator[None]:
    """Where tests act while requests run, the requests would else have ended if this process was stalled before."""
    start = link.start_process

    def start_process(its: socket.socket, variables: Any) -> "subprocess.Popen[bytes] | Any":
        its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it its least: some 4 KiB
        return start(its, variables)

    link.start_process = start_process
    yield
    link.start_process = start
