"""How the machines of an engine find each other: each connects to machine 0, and both prove that they have the secret.

The proof is an HMAC (RFC 2104) of random numbers of both sides, so the secret does not cross the wire and no proof can
be used again. What is sent afterwards is neither encrypted nor authenticated (ADR 0087).
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from quire.common import liveness
from quire.common.errors import ConfigError
from quire.common.log import logger
from quire.common.version import __version__
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.model import ModelConfig
from quire.config.parallel import NodesConfig
from quire.runner.parallel.messages import Connection, Message

JOIN_S = 300.0
"""How long machines wait for each other."""
_HANDSHAKE_S = 10.0
_MAX_HANDSHAKE_BYTES = 4096
_RETRY_S = 0.5
_UNREACHABLE_S = 10
"""How long sent bytes may stay unacknowledged."""
_SAMPLE_BYTES = 1024


class Challenge(Message):
    """From machine 0, to each that connects."""

    nonce: bytes


class Hello(Message):
    """From a machine, which proves that it has the secret."""

    version: str
    nnodes: int
    node_rank: int
    fingerprint: str
    nonce: bytes
    proof: bytes

    def proves(self, secret: bytes, challenge: Challenge) -> bool:
        """Whether the proof is right, found out in a time that does not depend on it."""
        return hmac.compare_digest(self.proof, self.expected_proof(secret, challenge))

    def expected_proof(self, secret: bytes, challenge: Challenge) -> bytes:
        """The proof of all that the message says."""
        said = self.version, self.nnodes, self.node_rank, self.fingerprint, self.nonce
        return _proof(secret, "machine", challenge.nonce, *said)


class Welcome(Message):
    """From machine 0, which proves that it has the secret, too."""

    proof: bytes


class Refused(Message):
    """From machine 0: why the machine cannot join."""

    reason: str


Greeting: TypeAlias = Welcome | Refused
_CHALLENGE = msgspec.msgpack.Decoder(Challenge)
_HELLO = msgspec.msgpack.Decoder(Hello)
_GREETING: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_Sent = TypeVar("_Sent")


def admit(nodes: NodesConfig, fingerprint: str) -> list[socket.socket]:
    """Wait until all other machines have joined. Returns their connections by `node_rank`.

    Raises ConfigError if the address cannot be listened at, if it needs a secret and there is none, or if a machine has
    not joined after JOIN_S.
    """
    secret, joined = _secret(nodes), dict[int, socket.socket]()
    with _listening(nodes) as server:
        logger.info("waiting for %d other machine(s) at %s", nodes.nnodes - 1, nodes.master_addr)
        end_s = time.monotonic() + JOIN_S
        try:
            while len(joined) < nodes.nnodes - 1:
                if time.monotonic() > end_s:
                    missing = sorted(set(range(1, nodes.nnodes)) - joined.keys())
                    raise ConfigError(
                        f"nnodes={nodes.nnodes}: machine(s) {missing} have not joined at {nodes.master_addr} for "
                        f"{JOIN_S:g} s; start each with --node-rank and the same --nnodes, --master-addr and secret"
                    )
                liveness.num_kernel_events += 2  # this process waits for others, and does not hang
                _greet_next(server, nodes, secret, fingerprint, joined)
        except BaseException:
            for sock in joined.values():
                sock.close()
            raise
    return [joined[rank] for rank in range(1, nodes.nnodes)]


def _greet_next(
    server: socket.socket, nodes: NodesConfig, secret: bytes, fingerprint: str, joined: dict[int, socket.socket]
) -> None:
    """Let the next machine that connects join, or refuse it."""
    try:
        sock, address = server.accept()
    except TimeoutError:
        return
    try:
        _set_up(sock)
        connection, challenge = _connection(sock), Challenge(secrets.token_bytes(32))
        connection.send(challenge)
        hello = connection.receive(_HELLO)
        if hello is None:
            raise ValueError("it has closed the connection")
        reason = _refusal(hello, challenge, nodes, secret, fingerprint, joined.keys())
        if reason is None:
            connection.send(Welcome(_proof(secret, "master", hello.nonce, challenge.nonce)))
            sock.settimeout(None)
            joined[hello.node_rank] = sock
            logger.info("machine %d has joined from %s", hello.node_rank, address[0])
            return
        connection.send(Refused(reason))
    except (OSError, ValueError) as error:
        reason = str(error)
    logger.warning("a machine at %s cannot join: %s", address[0], reason)
    sock.close()


def _refusal(
    hello: Hello, challenge: Challenge, nodes: NodesConfig, secret: bytes, fingerprint: str, joined: object
) -> str | None:
    """Why the machine cannot join; None if it can."""
    if not hello.proves(secret, challenge):
        return "its secret is another one; give --master-secret-file or QUIRE_MASTER_SECRET the same content everywhere"
    rank = hello.node_rank
    problems = {
        f"it runs quire {hello.version}, and machine 0 {__version__}; install the same": hello.version != __version__,
        f"it was started with nnodes={hello.nnodes}, and machine 0 with {nodes.nnodes}": hello.nnodes != nodes.nnodes,
        f"node_rank={rank} must be 1 to {nodes.nnodes - 1}": not 1 <= rank < nodes.nnodes,
        f"node_rank={rank} has joined already; give each machine a number of its own": rank in joined,  # type: ignore[operator]
        "its weights, their quantization or the model's config.json differ from machine 0's; give it the same model": (
            hello.fingerprint != fingerprint
        ),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def join(nodes: NodesConfig, fingerprint: str) -> socket.socket:
    """Connect to machine 0. Raises ConfigError if it is not there after JOIN_S, refuses this machine, or does not have
    the secret."""
    secret, end_s = _secret(nodes), time.monotonic() + JOIN_S
    while True:
        try:
            sock = socket.create_connection((nodes.host, nodes.port), timeout=_HANDSHAKE_S)
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"master_addr={nodes.master_addr}: no machine 0 answers there for {JOIN_S:g} s ({error}); start it "
                    f"with --nnodes {nodes.nnodes} --node-rank 0, or correct the address"
                ) from error
            time.sleep(_RETRY_S)
    try:
        _set_up(sock)
        _introduce(_connection(sock), nodes, secret, fingerprint)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError | ValueError) and not isinstance(error, ConfigError):
            raise ConfigError(
                f"master_addr={nodes.master_addr}: what answers there is no machine 0: {error}"
            ) from error
        raise
    sock.settimeout(None)
    return sock


def _introduce(connection: Connection, nodes: NodesConfig, secret: bytes, fingerprint: str) -> None:
    challenge = _received(connection, _CHALLENGE)
    hello = Hello(__version__, nodes.nnodes, nodes.node_rank, fingerprint, secrets.token_bytes(32), b"")
    connection.send(msgspec.structs.replace(hello, proof=hello.expected_proof(secret, challenge)))
    greeting = _received(connection, _GREETING)
    if isinstance(greeting, Refused):
        raise ConfigError(f"master_addr={nodes.master_addr}: machine 0 refuses this one: {greeting.reason}")
    if not hmac.compare_digest(greeting.proof, _proof(secret, "master", hello.nonce, challenge.nonce)):
        raise ConfigError(f"master_addr={nodes.master_addr}: what answers there does not have the secret")


def _connection(sock: socket.socket) -> Connection:
    """What follows the handshake is left to another one."""
    return Connection(sock, _MAX_HANDSHAKE_BYTES, reads_ahead=False)


def _received(connection: Connection, kind: msgspec.msgpack.Decoder[_Sent]) -> _Sent:
    if (message := connection.receive(kind)) is None:
        raise ValueError("it has closed the connection")
    return message


def _proof(secret: bytes, *said: object) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode(said), "sha256")


def _set_up(sock: socket.socket) -> None:
    """Send small messages at once, and notice a link that is interrupted."""
    sock.settimeout(_HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREACHABLE_S)


@contextmanager
def _listening(nodes: NodesConfig) -> Iterator[socket.socket]:
    try:
        server = socket.create_server((nodes.host, nodes.port), backlog=nodes.nnodes)
    except OSError as error:
        raise ConfigError(
            f"master_addr={nodes.master_addr}: cannot listen there: {error}; give an address of this machine and a "
            "port that is free"
        ) from error
    with server:
        server.settimeout(_RETRY_S)
        yield server


def _secret(nodes: NodesConfig) -> bytes:
    """The content of the file, or of the variable. Raises ConfigError if there is neither, and the address is one that
    other machines can reach."""
    if nodes.secret_file is not None:
        try:
            secret = Path(nodes.secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"master_secret_file={nodes.secret_file!r} cannot be read: {error}") from error
    else:
        secret = os.environ.get("QUIRE_MASTER_SECRET", "").strip().encode()
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


def fingerprint(config: ModelConfig) -> str:
    """Equal for equal weights that are used in the same way: of all names, types and shapes of the tensors and the
    first, middle and last bytes of each, and of what the config says."""
    digest = hashlib.blake2b(digest_size=16)
    said = config.architecture, config.dtype, config.quantization, config.head_quantization, dict(config.hf_config)
    digest.update(repr(said).encode())
    checkpoint = open_checkpoint(config.path)
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(repr((name, info.dtype, info.shape, info.num_bytes, info.block_type)).encode())
        with checkpoint.reading(name) as data:
            middle = len(data) // 2
            for start in (0, middle, max(0, len(data) - _SAMPLE_BYTES)):
                digest.update(data[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()
