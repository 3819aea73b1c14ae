"""The API process's end of the socket to the engine process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from quire import log
from quire.config.args import EngineArgs
from quire.engine.messages import (
    LENGTH_BYTES,
    CacheFrame,
    Ready,
    Start,
    StartFailed,
    StepDone,
    ToClient,
    ToEngine,
    frame_len,
    to_frame,
)
from quire.errors import EngineDeadError, error_named
from quire.log import logger

_EXIT_LIMIT_S = 5.0
"""an engine process whose socket is closed ends by itself; after so long it is killed"""

_READ_AHEAD_BYTES = 1024**2


class EngineClient:
    """One engine process, and the messages to and from it. `ready` is what it said when it had started."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self.pid = process.pid
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
        self._reading: asyncio.Task[None] | None = None
        self.ready: Ready
        self.death: EngineDeadError | None = None
        """why there is no engine any more"""

    @classmethod
    async def start(cls, args: EngineArgs) -> EngineClient:
        """Start the process and wait until the engine is ready. Raises as it did; EngineDeadError if it is gone."""
        ours, its = socket.socketpair()
        with its:
            try:
                process = _start_process(its)
                reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_READ_AHEAD_BYTES)
            except BaseException:
                ours.close()
                raise
        client = cls(process, reader, writer)
        try:
            client.send(Start(dataclasses.asdict(args), log.chosen_format))
            message = await client._receive()
            if isinstance(message, StartFailed):
                raise error_named(message.kind, message.message)
            if not isinstance(message, Ready):
                raise EngineDeadError(f"the engine did not start: {await client._end()}")
            client.ready = message
        except BaseException:
            await client.close()
            raise
        return client

    def listen(
        self, on_message: Callable[[StepDone | CacheFrame], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """Call these from now on: for every message, and once when the engine has died."""
        self._reading = asyncio.create_task(self._read(on_message, on_death))

    async def _read(
        self, on_message: Callable[[StepDone | CacheFrame], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        while isinstance(message := await self._receive(), StepDone | CacheFrame):
            try:
                on_message(message)
            except Exception:  # a listener's: the requests go on
                logger.exception("a message of the engine could not be taken")
        self.death = EngineDeadError("the engine is not running any more")
        self.death = EngineDeadError(f"the engine is not running any more: {await self._end()}")
        on_death(self.death)

    async def _receive(self) -> ToClient | None:
        """The next message; None once there are no more."""
        try:
            num_bytes = frame_len(await self._reader.readexactly(LENGTH_BYTES))
            return self._decoder.decode(await self._reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, OSError, ValueError, RecursionError):
            return None

    def send(self, message: ToEngine) -> None:
        """Have a message sent; see `drain`. Raises EngineDeadError, or what `to_frame` does."""
        if self.death is not None:
            raise self.death
        self._writer.write(to_frame(message))

    async def drain(self) -> None:
        """Wait until not much is left to send."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise self.death or EngineDeadError("the engine is not running any more") from error

    async def _end(self) -> str:
        """Close the socket and wait for the process; how it has ended, in words."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, _EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        status = self._process.returncode
        return f"its process was ended by signal {-status}" if status < 0 else f"its process ended with status {status}"

    async def close(self) -> None:
        """End the process. What was to be told of its end is told."""
        self._writer.close()
        if self._reading is not None:
            await asyncio.shield(self._reading)
        else:
            await self._end()


def _start_process(its: socket.socket) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C at a terminal reaches the client alone."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    descriptor = its.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.engine_process", str(descriptor)],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=environment,
        start_new_session=True,
    )
