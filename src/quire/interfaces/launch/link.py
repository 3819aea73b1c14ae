"""EngineLink: an engine that was started somewhere, and the bytes to and from it; here in a process of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from quire.common.liveness import end_of, start_child

READ_AHEAD_BYTES = 1024**2

_EXIT_LIMIT_S = 5.0
"""An engine process ends when its socket is closed. After this time it is killed."""


class EngineLink(Protocol):
    """An engine process, and the connection to it. The caller that launches it owns it, and calls `end` at last.

    It is used in one event loop. A closed connection ends the engine process.
    """

    reader: asyncio.StreamReader
    """What the engine sends; at its end if the engine has ended."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it runs on another machine."""

    @property
    def clock_s(self) -> float:
        """Seconds by which time.monotonic() of the engine is ahead of this process's; 0 on one machine."""

    @property
    def own_args(self) -> Mapping[str, Any]:
        """Arguments that the engine gets in the place of those of all, because of where it runs."""

    def write(self, data: bytes) -> None:
        """Queue bytes to be sent. They are dropped if the connection has ended."""

    async def drain(self) -> None:
        """Wait until little is left to send, or the connection has ended."""

    def close(self) -> None:
        """Close the connection."""

    def kill(self) -> None:
        """Kill the engine without waiting for anything."""

    async def end(self) -> str:
        """Close the connection, wait for the end of the process, and return a description of how it ended."""


Launcher = Callable[[], Awaitable[EngineLink]]
"""Starts an engine process, which waits for its Start message."""


class ProcessLink:
    """An engine in a process of this machine, behind a socket."""

    clock_s = 0.0
    own_args: Mapping[str, Any] = {}

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self._process = process
        self._writer = writer

    @classmethod
    async def launch(cls, secret: str = "") -> ProcessLink:
        """Start an engine process. `secret` is what the machines of an engine prove to each other to have."""
        ours, its = socket.socketpair()
        with its:
            try:
                process = start_process(its, {"QUIRE_MASTER_SECRET": secret} if secret else {})
                reader, writer = await asyncio.open_unix_connection(sock=ours, limit=READ_AHEAD_BYTES)
            except BaseException:
                ours.close()
                raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Queue bytes to be sent. They are dropped if the connection has ended, where uvloop would raise an error."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def drain(self) -> None:
        """Wait until little is left to send, or the connection has ended."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    async def end(self) -> str:
        """Close the socket, wait for the process to end, and return a description of how it ended."""
        self._writer.close()
        await run_in_thread(end_of, self._process, _EXIT_LIMIT_S)
        status = self._process.returncode
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"its process {ended}"


async def run_in_thread(call: Callable[..., object], *args: Any) -> None:
    """Run a call that blocks in another thread, where it continues even if the event loop ends. While Python exits, no
    thread accepts work; the call then runs in this one."""
    try:
        running = asyncio.get_running_loop().run_in_executor(None, call, *args)
    except RuntimeError:
        await asyncio.sleep(0)  # lets the event loop close the sockets for whose end the call may wait
        call(*args)
    else:
        await asyncio.shield(running)


def start_process(its: socket.socket, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an engine process with its end of the socket, and these environment variables beside this process's."""
    descriptor = its.fileno()
    return start_child("quire.engine.process.engine_process", [str(descriptor)], [descriptor], variables)
