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
from quire.engine.process import messages

_EXIT_LIMIT_S = 5.0
"""An engine process ends when its socket is closed. After this time it is killed."""

_READ_AHEAD_BYTES = 1024**2

LOADING_PATIENCE = 5
"""Factor by which the hang timeout is longer while an engine loads."""
_TICK_S = 0.5


class EngineClient:
    """One engine process, and the messages to and from it. `ready` is its message after it has started.

    A process that hangs is killed: one that is silent for the given time, or busy without progress (heartbeat.py).
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hang_timeout_s: float | None,
    ) -> None:
        self.pid = process.pid
        self.ready: messages.Ready | None = None
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[messages.ToClient] = msgspec.msgpack.Decoder(messages.ToClient)
        self._is_heard = self._is_alive = False
        """Since the last tick of the watch: whether a message was received; whether one of them showed progress."""
        self._is_loading = True
        self._progress: int | None = None
        self._hang = ""
        """Why the process was killed; empty if it was not."""
        self._watching = asyncio.create_task(self._watch(hang_timeout_s))

    @classmethod
    async def start(cls, args: EngineArgs, hang_timeout_s: float | None = None) -> EngineClient:
        """Start the process and wait until the engine is ready.

        Raises the error with which the engine failed to start, and EngineDeadError if the process ends or makes no
        progress for LOADING_PATIENCE * hang_timeout_s.
        """
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
            client.send(messages.Start(dataclasses.asdict(args), log.chosen_format))
            message = await client._receive()
            if isinstance(message, messages.StartFailed):
                raise error_named(message.kind, message.message)
            if not isinstance(message, messages.Ready):
                raise EngineDeadError(f"the engine did not start: {await client.end()}")
            client.ready = message
        except BaseException:
            await client.end()
            raise
        return client

    async def read(self, *readers: Callable[[messages.Event], None]) -> None:
        """Pass every message to the readers until the connection ends.

        A message that a reader cannot process ends the connection too: another engine then generates its tokens again,
        so that no request misses a token.
        """
        while isinstance(message := await self._receive(), messages.Event):
            try:
                for reader in readers:
                    reader(message)
            except Exception:
                logger.exception("a message from the engine could not be processed")
                return

    async def _receive(self) -> messages.ToClient | None:
        """Return the next message other than a heartbeat; None if the connection has ended or the data is malformed."""
        try:
            while True:
                num_bytes = messages.frame_len(await self._reader.readexactly(messages.LENGTH_BYTES))
                message = self._decoder.decode(await self._reader.readexactly(num_bytes))
                fault_point("api.receive", type(message).__name__)
                self._is_heard = True
                if not isinstance(message, messages.Heartbeat):
                    self._is_alive = True
                    self._is_loading &= not isinstance(message, messages.Ready | messages.ControlDone)
                    return message
                self._is_alive |= not message.is_busy or message.progress != self._progress
                self._progress = message.progress
        except (asyncio.IncompleteReadError, OSError):
            return None
        except Exception:
            logger.exception("a message from the engine could not be read")
            return None

    async def _watch(self, hang_timeout_s: float | None) -> None:
        """Kill a process that hangs. Ticks are counted, not time, because ticks stop while this process is stalled."""
        num_ticks, heard = 0, False
        while hang_timeout_s is not None:
            await asyncio.sleep(_TICK_S)
            num_ticks, heard = (0, False) if self._is_alive else (num_ticks + 1, heard or self._is_heard)
            self._is_alive = self._is_heard = False
            limit_s = hang_timeout_s * (LOADING_PATIENCE if self._is_loading else 1)
            if num_ticks * _TICK_S >= limit_s:
                self._hang = f"its process {'made no progress' if heard else 'was silent'} for {limit_s:g} s"
                self._process.kill()
                return

    def send(self, message: messages.ToEngine) -> None:
        """Queue a message to be sent; see `drain`. Raises the errors of `to_frame`, and then sends nothing.

        If the message cannot be written, the connection is closed, which ends the engine process.
        """
        frame = messages.to_frame(message)
        self._is_loading |= isinstance(message, messages.Control)
        try:
            fault_write("api.send", self._writer.write, frame)
        except Exception:
            logger.exception("a message to the engine could not be written")
            self._writer.close()

    async def drain(self) -> None:
        """Wait until little is left to send, or the connection has ended."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def end(self) -> str:
        """Close the socket, wait for the process to end, and return a description of how it ended."""
        self._watching.cancel()
        self._writer.close()
        waiting = asyncio.get_running_loop().run_in_executor(None, _wait_for, self._process)
        await asyncio.shield(waiting)  # continues where the event loop ends
        status = self._process.returncode
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._hang or f"its process {ended}"


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process whose socket was closed."""
    try:
        process.wait(_EXIT_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start_process(its: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own, so that Ctrl-C in a terminal reaches only the client."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    descriptor = its.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.process.engine_process", str(descriptor)],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=environment,
        start_new_session=True,
    )
