"""The API process's end of the socket to the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from quire.common import log
from quire.common.errors import EngineDeadError, error_named
from quire.common.faults import fault_point, fault_write
from quire.common.log import logger
from quire.config.args import EngineArgs
from quire.engine.process.messages import (
    LENGTH_BYTES,
    CacheFrame,
    Heartbeat,
    Ready,
    Start,
    StartFailed,
    StepDone,
    ToClient,
    ToEngine,
    frame_len,
    to_frame,
)

_EXIT_LIMIT_S = 5.0
"""an engine process whose socket is closed ends by itself; after so long it is killed"""

_READ_AHEAD_BYTES = 1024**2

LOADING_PATIENCE = 5
"""while it loads, an engine may be silent so many times as long"""
_TICK_S = 0.5


class EngineClient:
    """One engine process, and the messages to and from it. `ready` is what it said when it had started.

    A process that hangs is killed: one that is silent for the time given, or is busy and gets nowhere (heartbeat.py).
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hang_timeout_s: float | None,
    ) -> None:
        self.pid = process.pid
        self.ready: Ready | None = None
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
        self._is_heard = self._is_alive = False
        """since the watch last looked: anything came; a sign of life was in it"""
        self._progress: int | None = None
        self._hang = ""
        """why it was killed, if it was"""
        self._watching = asyncio.create_task(self._watch(hang_timeout_s))

    @classmethod
    async def start(cls, args: EngineArgs, hang_timeout_s: float | None = None) -> EngineClient:
        """Start the process and wait until the engine is ready. Raises as it did; EngineDeadError if it is gone, or
        shows no sign of life for LOADING_PATIENCE * hang_timeout_s."""
        ours, its = socket.socketpair()
        with its:
            try:
                process = _start_process(its)
                reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_READ_AHEAD_BYTES)
            except BaseException:
                ours.close()
                raise
        client = cls(process, reader, writer, hang_timeout_s)
        try:
            client.send(Start(dataclasses.asdict(args), log.chosen_format))
            message = await client._receive()
            if isinstance(message, StartFailed):
                raise error_named(message.kind, message.message)
            if not isinstance(message, Ready):
                raise EngineDeadError(f"the engine did not start: {await client.end()}")
            client.ready = message
        except BaseException:
            await client.end()
            raise
        return client

    async def read(self, *readers: Callable[[StepDone | CacheFrame], None]) -> None:
        """Hand every message to these, until there will be no more. One that cannot be taken is the last: what was in
        it another engine brings again, and nobody misses a token."""
        while isinstance(message := await self._receive(), StepDone | CacheFrame):
            try:
                for reader in readers:
                    reader(message)
            except Exception:
                logger.exception("a message of the engine could not be taken")
                return

    async def _receive(self) -> ToClient | None:
        """The next message that is no heartbeat; None once there are no more, or what comes is none."""
        try:
            while True:
                num_bytes = frame_len(await self._reader.readexactly(LENGTH_BYTES))
                message = self._decoder.decode(await self._reader.readexactly(num_bytes))
                fault_point("api.receive", type(message).__name__)
                self._is_heard = True
                if not isinstance(message, Heartbeat):
                    self._is_alive = True
                    return message
                self._is_alive |= not message.is_busy or message.progress != self._progress
                self._progress = message.progress
        except (asyncio.IncompleteReadError, OSError):
            return None
        except Exception:
            logger.exception("the engine's messages cannot be read")
            return None

    async def _watch(self, hang_timeout_s: float | None) -> None:
        """Kill a process that hangs. Ticks are counted, not time: while this process stands still they do too."""
        num_ticks, heard = 0, False
        while hang_timeout_s is not None:
            await asyncio.sleep(_TICK_S)
            num_ticks, heard = (0, False) if self._is_alive else (num_ticks + 1, heard or self._is_heard)
            self._is_alive = self._is_heard = False
            limit_s = hang_timeout_s * (1 if self.ready is not None else LOADING_PATIENCE)
            if num_ticks * _TICK_S >= limit_s:
                self._hang = f"its process {'did not get on' if heard else 'was silent'} for {limit_s:g} s"
                self._process.kill()
                return

    def send(self, message: ToEngine) -> None:
        """Have a message sent; see `drain`. Raises what `to_frame` does, and then sends nothing. Where it cannot be
        written the connection ends, and with it the process."""
        frame = to_frame(message)
        try:
            fault_write("api.send", self._writer.write, frame)
        except Exception:
            logger.exception("the engine cannot be written to")
            self._writer.close()

    async def drain(self) -> None:
        """Wait until not much is left to send, or nobody is there to send to."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def end(self) -> str:
        """Close the socket and wait for the process; how it has ended, in words."""
        self._watching.cancel()
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, _EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        status = self._process.returncode
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._hang or f"its process {ended}"


def _start_process(its: socket.socket) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C at a terminal reaches the client alone."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    descriptor = its.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.process.engine_process", str(descriptor)],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=environment,
        start_new_session=True,
    )
