"""An engine process behind a Ray actor: the actor passes bytes on, and this process's end of it is an EngineLink.

Only bytes cross Ray's wire, which Ray copies as they are; nothing of a request is ever pickled (ADR 0070).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.common.errors import ConfigError
from quire.common.version import __version__
from quire.interfaces.launch.link import READ_AHEAD_BYTES, ProcessLink

_END_LIMIT_S = 8.0
"""How long an actor may take to end its process, before it is killed."""


class Hello(msgspec.Struct):
    """What an actor reports about its engine process once it has been started."""

    version: str
    node: str
    pid: int
    machine: str
    """Identifies the running system, whose processes share a clock and their ids."""
    monotonic_s: float
    address: str = ""
    """HOST:PORT of the node, where an engine of several machines can await them; empty for an engine of one."""


class EngineActor:
    """Runs an engine process on the node where Ray has placed the actor. If the actor dies, the process does too."""

    def __init__(self) -> None:
        self._link: ProcessLink
        self._port = contextlib.ExitStack()

    async def start(self, secret: bytes) -> bytes:
        """Start the process, and return a Hello. `secret` is what the machines of an engine prove to each other to
        have; empty for an engine of one."""
        address = self._keep_port() if secret else ""
        self._link = await ProcessLink.launch(secret.hex())
        hello = Hello(__version__, os.uname().nodename, self._link.pid, machine_id(), time.monotonic(), address)
        return msgspec.msgpack.encode(hello)

    def _keep_port(self) -> str:
        """Keep a port of this node free for the engine process, which can listen there as long as this one does not.
        Returns the address."""
        import ray

        sock = self._port.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((ray.util.get_node_ip_address(), 0))
        host, port = sock.getsockname()
        return f"{host}:{port}"

    async def write(self, data: bytes) -> bytes:
        """Send bytes to the engine, and return none as soon as it has read enough to be sent more."""
        self._link.write(data)
        await self._link.drain()
        return b""

    async def read(self) -> bytes:
        """Wait for bytes from the engine and return them; none if it has ended."""
        with contextlib.suppress(OSError):
            return await self._link.reader.read(READ_AHEAD_BYTES)
        return b""

    async def end(self) -> bytes:
        """Close the engine's socket, wait for its end, and return how it ended."""
        self._port.close()
        return (await self._link.end()).encode()


def machine_id() -> str:
    """The id that Linux has given to this start of the machine; of other systems, the name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename


class RayLink:
    """The end of an EngineActor in the process that uses the engine.

    Calls of an actor may overtake each other, so there is one call to `read` and one to `write` at a time.
    """

    own_args: Mapping[str, Any] = {}

    def __init__(self, actor: Any, hello: Hello, clock_s: float) -> None:
        """`clock_s` is used for an engine of another machine."""
        is_here = hello.machine == machine_id()
        self.pid = hello.pid if is_here else None
        self.clock_s = 0.0 if is_here else clock_s
        self.address = hello.address
        self.reader = asyncio.StreamReader(limit=READ_AHEAD_BYTES)
        self.reader.set_transport(self)  # type: ignore[arg-type]  # it pauses reading while much is unread
        self._actor = actor
        self._unsent = bytearray()
        self._may_read, self._has_unsent, self._has_room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._may_read.set()
        self._has_room.set()
        self._reading = asyncio.create_task(self._read_all())
        self._writing = asyncio.create_task(self._write_all())
        self._ending: asyncio.Task[str] | None = None

    @classmethod
    async def start(cls, actor: Any, secret: bytes = b"") -> RayLink:
        """Start the engine process of an actor, with the secret of an engine of several machines. Raises ConfigError if
        it has another version of Quire."""
        asked_s = time.monotonic()
        hello = msgspec.msgpack.decode(await actor.start.remote(secret), type=Hello)
        if hello.version != __version__:
            raise ConfigError(
                f"the node {hello.node} of the Ray cluster has quire {hello.version}, and this process {__version__}: "
                "install the same version on all nodes"
            )
        return cls(actor, hello, hello.monotonic_s - (asked_s + time.monotonic()) / 2)

    def pause_reading(self) -> None:
        """Read no more; called by the reader."""
        self._may_read.clear()

    def resume_reading(self) -> None:
        """Read again; called by the reader."""
        self._may_read.set()

    async def _read_all(self) -> None:
        from ray.exceptions import RayError

        try:
            with contextlib.suppress(RayError):  # `end` says what has happened to the actor
                while data := await self._actor.read.remote():
                    self.reader.feed_data(data)
                    await self._may_read.wait()
        finally:
            self.close()

    async def _write_all(self) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # the reader notices it too
            while True:
                await self._has_unsent.wait()
                piece = bytes(self._unsent[:READ_AHEAD_BYTES])
                del self._unsent[:READ_AHEAD_BYTES]
                await self._actor.write.remote(piece)
                if not self._unsent:
                    self._has_unsent.clear()
                if len(self._unsent) < READ_AHEAD_BYTES:
                    self._has_room.set()

    def write(self, data: bytes) -> None:
        """Queue bytes to be sent. They are dropped if the connection has ended."""
        if self._writing.done() or self._writing.cancelling():
            return
        self._unsent += data
        self._has_unsent.set()
        if len(self._unsent) >= READ_AHEAD_BYTES:
            self._has_room.clear()

    async def drain(self) -> None:
        """Wait until little is left to send, or the connection has ended."""
        await self._has_room.wait()

    def close(self) -> None:
        """End the connection. The engine process ends with `end`, which follows."""
        self.reader.feed_eof()
        self._reading.cancel()
        self._writing.cancel()
        self._unsent.clear()
        self._has_room.set()

    def kill(self) -> None:
        """Kill the actor, which ends its process. Nothing is awaited, as its node may no longer answer."""
        import ray

        ray.kill(self._actor)
        self.close()

    async def end(self) -> str:
        """Close the connection, wait for the process to end, and return a description of how it ended."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> str:
        import ray
        from ray.exceptions import RayError

        self.close()
        try:
            async with asyncio.timeout(_END_LIMIT_S):
                return str((await self._actor.end.remote()).decode())
        except TimeoutError:
            return f"its actor did not answer for {_END_LIMIT_S:g} s"
        except RayError as error:
            return f"its actor ended: {reason(error)}"
        finally:
            ray.kill(self._actor)


def reason(error: Exception) -> str:
    """The first line of Ray's message, which may have many."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
