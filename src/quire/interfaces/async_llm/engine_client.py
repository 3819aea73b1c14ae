"""The API process's end of the connection to an engine process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import msgspec

from quire.common import log
from quire.common.errors import ConfigError, EngineDeadError, error_named
from quire.common.faults import fault_point, fault_write
from quire.common.log import logger
from quire.config.args import EngineArgs
from quire.engine.process import messages
from quire.interfaces.launch.clocks import shifted
from quire.interfaces.launch.link import EngineLink, Launcher, ProcessLink

LOADING_PATIENCE = 5
"""Factor by which the hang timeout is longer while an engine loads."""
_TICK_S = 0.5


class EngineClient:
    """One engine process, and the messages to and from it. `ready` is its message after it has started.

    A process that hangs is killed: one that is silent for the given time, or busy without progress (heartbeat.py).
    """

    def __init__(self, link: EngineLink, hang_timeout_s: float | None) -> None:
        self.pid = link.pid
        self.ready: messages.Ready | None = None
        self.silent_s = 0.0
        """For how long it has shown no progress."""
        self._link = link
        self._decoder: msgspec.msgpack.Decoder[messages.ToClient] = msgspec.msgpack.Decoder(messages.ToClient)
        self._is_heard = self._is_alive = False
        """Since the last tick of the watch: whether a message was received; whether one of them showed progress."""
        self._is_loading = True
        self._progress: int | None = None
        self._hang = ""
        """Why the process was killed; empty if it was not."""
        self._watching = asyncio.create_task(self._watch(hang_timeout_s))

    @classmethod
    async def start(
        cls, args: EngineArgs, hang_timeout_s: float | None = None, *, launch: Launcher = ProcessLink.launch
    ) -> EngineClient:
        """Start the process and wait until the engine is ready.

        Raises the error with which the engine failed to start, ConfigError for arguments that cannot be sent, and
        EngineDeadError if the process ends or makes no progress for LOADING_PATIENCE * hang_timeout_s.
        """
        client = cls(await launch(), hang_timeout_s)
        try:
            given = dataclasses.asdict(args) | dict(client._link.own_args)
            try:
                client.send(messages.Start(given, log.chosen_format, hang_timeout_s))
            except OverflowError as error:
                raise ConfigError(
                    "an integer in the engine's arguments has more than 64 bits; give a smaller one"
                ) from error
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
        reader = self._link.reader
        try:
            while True:
                num_bytes = messages.frame_len(await reader.readexactly(messages.LENGTH_BYTES))
                message = self._decoder.decode(await reader.readexactly(num_bytes))
                fault_point("api.receive", type(message).__name__)
                self._is_heard = True
                if not isinstance(message, messages.Heartbeat):
                    self._is_alive = True
                    self._is_loading &= not isinstance(message, messages.Ready | messages.ControlDone)
                    return shifted(message, -self._link.clock_s)
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
            self.silent_s = num_ticks * _TICK_S
            limit_s = hang_timeout_s * (LOADING_PATIENCE if self._is_loading else 1)
            if self.silent_s >= limit_s:
                self._hang = f"its process {'made no progress' if heard else 'was silent'} for {limit_s:g} s"
                self._link.kill()
                return

    def send(self, message: messages.ToEngine) -> None:
        """Queue a message to be sent; see `drain`. Raises the errors of `to_frame`, and then sends nothing.

        If the message cannot be written, the connection is closed, which ends the engine process.
        """
        frame = messages.to_frame(shifted(message, self._link.clock_s))
        self._is_loading |= isinstance(message, messages.Control)
        try:
            fault_write("api.send", self._link.write, frame)
        except Exception:
            logger.exception("a message to the engine could not be written")
            self._link.close()

    async def drain(self) -> None:
        """Wait until little is left to send, or the connection has ended."""
        await self._link.drain()

    async def end(self) -> str:
        """Close the connection, wait for the process to end, and return a description of how it ended."""
        self._watching.cancel()
        ended = await self._link.end()
        return self._hang or ended
