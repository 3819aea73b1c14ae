"""How the machines of an engine find each other: each connects to machine 0, and both prove that they have the secret.

The proof is an HMAC (RFC 2104) of random numbers of both sides, so the secret does not cross the wire and no proof can
be used again. What is sent afterwards is neither encrypted nor authenticated (ADR 0087).
"""

import hashlib
import hmac
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec

from quire.common import liveness
from quire.common.errors import ConfigError
from quire.common.log import logger
from quire.common.version import __version__
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.model import ModelConfig
from quire.config.parallel import NodesConfig
from quire.runner.parallel.machines.secret import secret_of
from quire.runner.parallel.messages import Connection, Message, readable

JOIN_S = 300.0
"""How long machines wait for each other."""
_REMIND_S = 10.0
"""How often one that waits says so."""
_HANDSHAKE_S = 10.0
_MAX_HANDSHAKE_BYTES = 4096
_MAX_CANDIDATES = 64
"""Handshakes that run at once. One more ends the oldest."""
_RETRY_S = 0.5
_UNREACHABLE_S = 10
"""How long sent bytes may stay unacknowledged."""
_KEEPALIVE_S = 2
_SAMPLE_BYTES = 1024


ConnectionName: TypeAlias = tuple[int, int]
"""A `node_rank`, and the number of one of its connections."""


class Challenge(Message):
    """From machine 0, to each that connects."""

    nonce: bytes


class Hello(Message):
    """From a machine, which proves that it has the secret."""

    version: str
    nnodes: int
    node_rank: int
    fingerprint: str
    num_ranks: int | None
    """As NodesConfig has it."""
    number: int
    """Of the machine's connections: 0 for messages, and 1 for what ranks gather, where machines divide these."""
    nonce: bytes
    proof: bytes

    @property
    def name(self) -> ConnectionName:
        """What the connection is: of which machine, and which one."""
        return self.node_rank, self.number

    def proves(self, secret: bytes, challenge: Challenge) -> bool:
        """Whether the proof is right, found out in a time that does not depend on it."""
        return hmac.compare_digest(self.proof, self.expected_proof(secret, challenge))

    def expected_proof(self, secret: bytes, challenge: Challenge) -> bytes:
        """The proof of all that the message says."""
        said = msgspec.structs.astuple(msgspec.structs.replace(self, proof=b""))
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


@dataclass(slots=True)
class _Candidate:
    """What has connected, and has not joined yet."""

    connection: Connection
    address: str
    challenge: Challenge
    end_s: float = field(default_factory=lambda: time.monotonic() + _HANDSHAKE_S)


class _Admission:
    """The handshakes with all that connect. They run side by side, so that strangers delay no machine."""

    def __init__(self, nodes: NodesConfig, fingerprint: str) -> None:
        self._nodes, self._fingerprint, self._secret = nodes, fingerprint, secret_of(nodes)
        self._candidates = dict[socket.socket, _Candidate]()
        self.joined = dict[ConnectionName, socket.socket]()
        self.wanted = [(rank, number) for rank in range(1, nodes.nnodes) for number in range(nodes.num_connections)]

    @property
    def missing(self) -> list[int]:
        """The machines that have not joined, or have ended since."""
        return sorted({name[0] for name in self.wanted if not self._is_taken(name)})

    def wait(self, server: socket.socket) -> None:
        """Accept new connections and continue the handshakes that have received something, for at most _RETRY_S."""
        for sock in readable([server, *self._candidates], _RETRY_S):
            if sock is server:
                self._accept(server)
            elif sock in self._candidates:
                self._read_hello(sock)
        now_s = time.monotonic()
        for sock in [sock for sock, candidate in self._candidates.items() if candidate.end_s < now_s]:
            self._reject(sock, f"it has said nothing for {_HANDSHAKE_S:g} s")

    def _accept(self, server: socket.socket) -> None:
        try:
            sock, address = server.accept()
        except OSError as error:  # it has gone already
            logger.debug("a connection was broken off: %s", error)
            return
        if len(self._candidates) >= _MAX_CANDIDATES:
            self._reject(next(iter(self._candidates)), f"{_MAX_CANDIDATES} others have connected since")
        _set_up(sock)
        sock.setblocking(False)
        candidate = _Candidate(_connection(sock), address[0], Challenge(os.urandom(32)))
        self._candidates[sock] = candidate
        try:
            candidate.connection.send(candidate.challenge)
        except OSError as error:
            self._reject(sock, str(error))

    def _read_hello(self, sock: socket.socket) -> None:
        candidate = self._candidates[sock]
        try:
            hello = _received(candidate.connection, _HELLO)
            if (reason := self._refusal(hello, candidate.challenge)) is None:
                proof = _proof(self._secret, "master", hello.nonce, candidate.challenge.nonce)
                candidate.connection.send(Welcome(proof))
                sock.settimeout(None)
                del self._candidates[sock]
                self.joined[hello.name] = sock
                logger.info("machine %d has joined from %s", hello.node_rank, candidate.address)
                return
            candidate.connection.send(Refused(reason))
        except BlockingIOError:  # the rest of the message has not come yet
            return
        except (OSError, ValueError) as error:
            reason = str(error)
        self._reject(sock, reason)

    def _reject(self, sock: socket.socket, reason: str) -> None:
        logger.warning("a machine at %s cannot join: %s", self._candidates.pop(sock).address, reason)
        sock.close()

    def close(self) -> None:
        """Close the connections of all that have not joined."""
        for sock in self._candidates:
            sock.close()

    def _refusal(self, hello: Hello, challenge: Challenge) -> str | None:
        """Why the machine cannot join; None if it can."""
        if not hello.proves(self._secret, challenge):
            return "its secret is another one; give all the same in --master-secret-file or QUIRE_MASTER_SECRET"
        rank, nnodes, num_ranks = hello.node_rank, self._nodes.nnodes, self._nodes.num_ranks
        problems = {
            f"it runs quire {hello.version}, and machine 0 {__version__}; install the same": (
                hello.version != __version__
            ),
            f"it was started with nnodes={hello.nnodes}, and machine 0 with {nnodes}": hello.nnodes != nnodes,
            f"it divides {_divided(hello.num_ranks)} among machines, and machine 0 {_divided(num_ranks)}; give all the "
            "same --tensor-parallel-size and --pipeline-parallel-size": hello.num_ranks != num_ranks,
            f"node_rank={rank} must be 1 to {nnodes - 1}": hello.name not in self.wanted,
            f"node_rank={rank} has joined already; give each machine a number of its own": self._is_taken(hello.name),
            "its weights, their quantization or the model's config.json differ from machine 0's; give it the same "
            "model, --dtype and --quantization": hello.fingerprint != self._fingerprint,
        }
        return next((problem for problem, is_so in problems.items() if is_so), None)

    def _is_taken(self, name: ConnectionName) -> bool:
        """Whether the machine that has joined as this one is still there. If it has ended, its place is free."""
        if (sock := self.joined.get(name)) is None:
            return False
        try:
            has_ended = not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            has_ended = True
        if has_ended:
            self.joined.pop(name).close()
        return not has_ended


def _divided(num_ranks: int | None) -> str:
    return "stages" if num_ranks is None else f"{num_ranks} ranks"


class _Patience:
    """Of one that waits for other machines."""

    def __init__(self, *, is_endless: bool = False) -> None:
        now_s = time.monotonic()
        self._end_s, self._pause_s = (math.inf, JOIN_S) if is_endless else (now_s + JOIN_S, _REMIND_S)
        self._remind_s = now_s + self._pause_s

    def has_ended(self, reason: str) -> bool:
        """Whether JOIN_S are over. If they are not, the log says from time to time for what reason it goes on."""
        now_s = time.monotonic()
        if now_s > self._end_s:
            return True
        if now_s > self._remind_s:
            self._remind_s = now_s + self._pause_s
            left = "" if math.isinf(self._end_s) else f", for at most {int(self._end_s - now_s)} s more"
            logger.warning("still waiting%s: %s", left, reason)
        return False


def admit(nodes: NodesConfig, fingerprint: str) -> list[list[socket.socket]]:
    """Wait until all other machines have joined. Returns the connections of each by `node_rank`.

    Raises ConfigError if the address cannot be listened at, if it needs a secret and there is none, or if a machine has
    not joined after JOIN_S.
    """
    admission = _Admission(nodes, fingerprint)
    joined = admission.joined
    with _listening(nodes) as server, closing(admission):
        logger.info("waiting for %d other machine(s) at %s", nodes.nnodes - 1, nodes.master_addr)
        patience = _Patience()
        try:
            while missing := admission.missing:
                if patience.has_ended(f"machine(s) {missing} have not joined at {nodes.master_addr}"):
                    raise ConfigError(
                        f"nnodes={nodes.nnodes}: machine(s) {missing} have not joined at {nodes.master_addr} for "
                        f"{JOIN_S:g} s; start each with --node-rank and the same --nnodes, --master-addr and secret"
                    )
                liveness.num_kernel_events += 2  # this process waits for others, and does not hang
                admission.wait(server)
        except BaseException:
            for sock in joined.values():
                sock.close()
            raise
    return [[joined[rank, number] for number in range(nodes.num_connections)] for rank in range(1, nodes.nnodes)]


def join(nodes: NodesConfig, fingerprint: str, number: int = 0, *, is_again: bool = False) -> socket.socket:
    """Connect to machine 0, for this machine's connection of this number. Raises ConfigError if it is not there after
    JOIN_S, refuses this machine, or does not have the secret. A machine that joins again waits for ever, since machine
    0 may sleep."""
    secret, patience = secret_of(nodes), _Patience(is_endless=is_again)
    while True:
        try:
            return _joined(nodes, secret, (fingerprint, number))
        except OSError as error:
            remedy = f"start it with --nnodes {nodes.nnodes} --node-rank 0, or correct the address"
            if patience.has_ended(f"no machine 0 answers at {nodes.master_addr} ({error}); {remedy}"):
                raise ConfigError(
                    f"master_addr={nodes.master_addr}: no machine 0 answers there for {JOIN_S:g} s ({error}); {remedy}"
                ) from error
            time.sleep(_RETRY_S)


def _joined(nodes: NodesConfig, secret: bytes, said: tuple[str, int]) -> socket.socket:
    """A connection to machine 0. Raises OSError if nothing answers, or what answers closes the connection, as a machine
    0 does that ends meanwhile or is asked by many, and ConfigError otherwise."""
    sock = socket.create_connection((nodes.host, nodes.port), timeout=_HANDSHAKE_S)
    try:
        _set_up(sock)
        _introduce(_connection(sock), nodes, secret, said)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError | ValueError) and not isinstance(error, ConfigError):
            raise ConfigError(
                f"master_addr={nodes.master_addr}: what answers there is no machine 0: {error}"
            ) from error
        raise
    sock.settimeout(None)
    return sock


def _introduce(connection: Connection, nodes: NodesConfig, secret: bytes, said: tuple[str, int]) -> None:
    challenge = _received(connection, _CHALLENGE)
    fingerprint, number = said
    given = __version__, nodes.nnodes, nodes.node_rank, fingerprint, nodes.num_ranks, number
    hello = Hello(*given, os.urandom(32), b"")
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
        raise ConnectionResetError("it has closed the connection")
    return message


def _proof(secret: bytes, *said: object) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode(said), "sha256")


def _set_up(sock: socket.socket) -> None:
    """Send small messages at once, and notice a link that is interrupted."""
    sock.settimeout(_HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # also while nothing is sent
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREACHABLE_S)


@contextmanager
def _listening(nodes: NodesConfig) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)
        family = min(each[0] for each in found)  # IPv4 where the host has both
        server = socket.create_server((nodes.host, nodes.port), family=family, backlog=_MAX_CANDIDATES)
    except OSError as error:
        raise ConfigError(
            f"master_addr={nodes.master_addr}: cannot listen there: {error}; give an address of this machine and a "
            "port that is free"
        ) from error
    with server:
        server.setblocking(False)
        yield server


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
