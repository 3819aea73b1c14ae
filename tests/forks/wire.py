"""What crosses the fork server's socket: a JSON message with descriptors one way, and numbers the other way."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

_MAX_DESCRIPTORS = 16


class Request(NamedTuple):
    """A module to be run. The descriptors that come with it are to get these numbers."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    is_new_session: bool


def send(path: str, message: Request | int, descriptors: Sequence[int] = ()) -> socket.socket:
    """Ask the fork server at this path to run something, or for the children of a process. Returns the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [b"."], list(descriptors))
    connection.sendall(json.dumps(message).encode() + b"\n")
    return connection


def receive(connection: socket.socket) -> tuple[Request | int, list[int]]:
    """The other side of `send`. If that has ended halfway, what came is closed, for others wait for its end."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, _MAX_DESCRIPTORS)
    try:
        with connection.makefile("rb") as file:
            message = json.loads(file.readline())
    except (OSError, ValueError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message if isinstance(message, int) else Request(*message), descriptors


def send_number(connection: socket.socket, number: int) -> None:
    connection.sendall(struct.pack("i", number))


def receive_number(connection: socket.socket, flags: int = 0) -> int:
    """A number. With MSG_PEEK it stays there for others."""
    content = connection.recv(4, flags | socket.MSG_WAITALL)
    assert content, "the fork server has ended"
    return int(struct.unpack("i", content)[0])


def read(connection: socket.socket) -> bytes:
    """All until the other side closes the connection."""
    with connection, connection.makefile("rb") as file:
        return file.read()
