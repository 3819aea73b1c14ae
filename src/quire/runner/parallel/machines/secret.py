"""What the machines of an engine prove to each other to have."""

import ipaddress
import os
import socket
from pathlib import Path

from quire.common.errors import ConfigError
from quire.common.log import logger
from quire.config.parallel import NodesConfig


def secret_of(nodes: NodesConfig) -> bytes:
    """The content of the file, or of the variable. Raises ConfigError if there is neither, and the address is one that
    other machines can reach."""
    if nodes.secret_file is not None:
        try:
            secret = Path(nodes.secret_file).read_bytes().strip()
            is_open = bool(Path(nodes.secret_file).stat().st_mode & 0o077)
        except OSError as error:
            raise ConfigError(f"master_secret_file={nodes.secret_file!r} cannot be read: {error}") from error
        if not secret:
            raise ConfigError(
                f"master_secret_file={nodes.secret_file!r} is empty; write a secret to it (`openssl rand -hex 32`)"
            )
        if is_open:
            logger.warning("master_secret_file=%r can be read by others; run `chmod 600` on it", nodes.secret_file)
    else:
        secret = os.fsencode(os.environ.get("QUIRE_MASTER_SECRET", "")).strip()
    if not secret and not _is_loopback(nodes):
        raise ConfigError(
            f"master_addr={nodes.master_addr}: other machines can reach this address, so a secret is needed; write one "
            f"to a file (`openssl rand -hex 32`), and give it to all machines as --master-secret-file or in "
            f"QUIRE_MASTER_SECRET"
        )
    return secret


def _is_loopback(nodes: NodesConfig) -> bool:
    try:
        found = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"master_addr={nodes.master_addr}: the host is unknown: {error}") from error
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
