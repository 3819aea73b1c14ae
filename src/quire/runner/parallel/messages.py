"""What rank 0 and the other ranks send each other: frames of msgpack over a socket that only they have."""

import select
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**31
_READ_AHEAD_BYTES = 65536


class Message(msgspec.Struct, tag=True):
    """Base of all messages."""


class Start(Message):
    """The first message to a rank or a stage: which one it is, and its share of the engine; to the first rank of
    another machine all of the engine, which decides the rest."""

    number: int
    share: bytes
    """EngineConfig and KVCacheConfig, as `configs.to_bytes` writes them."""
    slot_bytes: int = 0
    """Of what ranks gather at once; the first rank of another machine decides it."""
    hang_timeout_s: float | None = None
    """As in `liveness`, of the engine; not needed by a rank that another one has started."""


class Step(Message):
    """Execute a batch."""

    batch: bytes
    """As `quire.common.batch.encode` writes it."""
    states: tuple[memoryview, ...] = ()
    """What the stage before gives for it."""


class DraftPass(Message):
    """Run a pass of what drafts."""

    batch: bytes
    """Its sequences, as a Batch."""
    rows: list[int]
    """The rows of hidden states that a draft head reads; empty for a draft model."""
    is_first: bool
    """Whether a head reads the model's states, and not its own."""


class LoadAdapter(Message):
    """As Executor.load_adapter."""

    slot: int
    folder: Path
    digest: str | None


class UnloadAdapter(Message):
    """As Executor.unload_adapter."""

    slot: int


class Restart(Message):
    """A step has failed somewhere: begin anew."""


class Done(Message):
    """What was asked for is done, or has Failed."""


class Failed(Message):
    """What was asked for has failed."""

    kind: str
    text: str


ToRank: TypeAlias = Start | Step | DraftPass | LoadAdapter | UnloadAdapter | Restart
_Sent = TypeVar("_Sent")


def readable(sockets: Iterable[socket.socket], timeout_s: float) -> list[socket.socket]:
    """The sockets from which something can be read, or the end. Waits for one at most this long. Unlike select, poll
    takes descriptors of any number, which a program with many open files has."""
    by_descriptor, poller = {sock.fileno(): sock for sock in sockets}, select.poll()
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poller.poll(1000 * timeout_s)]


class Connection:
    """A socket, and the messages that are read from it."""

    def __init__(
        self, sock: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES, *, reads_ahead: bool = True
    ) -> None:
        """Without `reads_ahead`, nothing behind a message is read before the next one is asked for."""
        self.socket = sock
        self._max_frame_bytes, self._least_bytes = max_frame_bytes, _READ_AHEAD_BYTES if reads_ahead else 0
        self._buffer = bytearray()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.send_frame(to_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what `to_frame` made."""
        self.socket.sendall(frame)

    def receive(self, kind: msgspec.msgpack.Decoder[_Sent]) -> _Sent | None:
        """The next message; None at the end. Raises ValueError for anything but a message of this kind."""
        frame = self.receive_frame()
        return None if frame is None else kind.decode(memoryview(frame)[_LENGTH.size :])

    def receive_frame(self) -> bytes | None:
        """The next message as `to_frame` made it; None at the end. Raises ValueError if it is too long."""
        if not self._fill(_LENGTH.size):
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._max_frame_bytes:
            raise ValueError(f"a frame of {length} bytes, of at most {self._max_frame_bytes}")
        end = _LENGTH.size + length
        if not self._fill(end):
            return None
        frame, self._buffer = bytes(self._buffer[:end]), self._buffer[end:]
        return frame

    def is_readable(self, timeout_s: float) -> bool:
        """Wait for a message at most this long. Returns whether one is there, or a part of it, or the end."""
        return bool(self._buffer) or bool(readable([self.socket], timeout_s))

    def _fill(self, num_bytes: int) -> bool:
        while len(self._buffer) < num_bytes:
            data = self.socket.recv(max(self._least_bytes, num_bytes - len(self._buffer)))
            if not data:
                return False
            self._buffer += data
        return True

    def close(self) -> None:
        """Close the socket; the other end reads its end."""
        self.socket.close()


def to_frame(message: Message) -> bytes:
    """The message with its length before it."""
    data = msgspec.msgpack.encode(message, enc_hook=str)
    return _LENGTH.pack(len(data)) + data


TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=lambda kind, value: kind(value))
