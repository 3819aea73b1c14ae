"""Ports for servers of other programs, which have to be named before they listen."""

import random
import socket
from pathlib import Path

_LEAST = 10_000


def free_port() -> int:
    """A port of 127.0.0.1 at which nothing listens. It is below those that the system chooses itself, so that no
    connection of another test takes it before the server listens."""
    least_chosen = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(_LEAST, least_chosen) if least_chosen > 2 * _LEAST else range(2 * _LEAST, 2**16)
    while True:
        port = random.SystemRandom().choice(candidates)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
