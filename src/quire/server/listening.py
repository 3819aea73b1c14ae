"""Where a server listens: its port or Unix socket, its certificates, and the HTTP server's configuration."""

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from quire.common.errors import ConfigError
from quire.server.config import ServerArgs
from quire.server.http.protocol import limited_protocol

_BACKLOG = 2048
_LAST_CONNECTIONS_S = 2


def uvicorn_config(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    """Raises ConfigError if certificate or key cannot be used."""
    _check_certificates(args)
    config = uvicorn.Config(
        app,
        http=limited_protocol(args.max_header, args.header_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(args.trusted_proxies),
        forwarded_allow_ips=list(args.trusted_proxies),
        timeout_keep_alive=max(1, round(args.idle_timeout_s)),
        timeout_graceful_shutdown=_LAST_CONNECTIONS_S,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if args.ssl_ca_certs else ssl.CERT_NONE,
    )
    config.load()
    return config


def _check_certificates(args: ServerArgs) -> None:
    """Raises ConfigError with the file that cannot be used. A key with a passphrase is one: without this check, OpenSSL
    would wait for the passphrase on the terminal."""
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except OSError as error:
        key = "its private key" if args.ssl_keyfile is None else f"ssl_keyfile={args.ssl_keyfile!r}"
        raise ConfigError(
            f"ssl_certfile={args.ssl_certfile!r} or {key} cannot be used: {error}; the key must belong to the "
            "certificate and have no passphrase"
        ) from error
    try:
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"ssl_ca_certs={args.ssl_ca_certs!r} cannot be used: {error}") from error


@contextlib.contextmanager
def listening(args: ServerArgs) -> Iterator[socket.socket]:
    """A bound socket, closed in the end. Raises ConfigError if it is unavailable."""
    if args.uds is None:
        with _bind_port(args.host, args.port) as sock:
            yield sock
        return
    path = Path(args.uds)
    with _bind_path(path) as sock:
        own = path.stat()
        try:
            yield sock
        finally:
            if path.exists() and os.path.samestat(own, path.stat()):  # otherwise another server has taken over the path
                path.unlink()


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={host!r} is not an address of this machine: {error}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        what = "in use by another program" if error.errno == errno.EADDRINUSE else f"unavailable: {error.strerror}"
        raise ConfigError(
            f"port {port} of {host} is {what}; choose another one with --port, or 0 for any free port"
        ) from error
    return sock


def _bind_path(path: Path) -> socket.socket:
    """Bind a Unix socket, after removing one that a killed server left behind."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise OSError("it is in use by another server; choose another path")
            path.unlink()
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds={str(path)!r} cannot be created: {error}") from error
    return sock


def server_url(args: ServerArgs, sock: socket.socket) -> str:
    """The address to which clients connect, with the port that was bound."""
    if args.uds is not None:
        return f"unix:{args.uds}"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http{'s' if args.ssl_certfile else ''}://{host}:{sock.getsockname()[1]}"
