"""Keeps an engine process running: starts it, and starts another one when it has died or hung."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from quire.common.errors import EngineDeadError
from quire.common.log import logger
from quire.config.args import EngineArgs
from quire.engine.process.messages import Event, Ready, ToEngine
from quire.interfaces.async_llm.engine_client import EngineClient

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
SILENT_S = 2.0
"""An engine that has shown no progress for this time may hang; heartbeats come every second."""
HEALTHY_S = 10.0
"""After an engine has run for this time, the delay before the next start begins at FIRST_DELAY_S again."""
MAX_FAILED_STARTS = 3
"""After this number of consecutive failed starts, waiting requests fail. Further starts are still attempted."""


class Supervised(Protocol):
    """A user of the engine, which is notified of its events in the event loop."""

    def on_message(self, message: Event) -> None:
        """The engine has sent a message."""

    def on_death(self, error: EngineDeadError) -> None:
        """The engine has ended; another one is being started."""

    def on_restart(self, ready: Ready) -> None:
        """Another engine is ready, which has received none of the earlier messages."""

    def on_loss(self, error: EngineDeadError) -> None:
        """No engine is expected soon."""


class Supervisor:
    """Runs an engine process, and a new one with the same arguments when it ends. `send` raises while none runs."""

    def __init__(
        self,
        args: EngineArgs,
        hang_timeout_s: float | None = None,
        *,
        name: str = "",
        start: Callable[[EngineArgs, float | None], Awaitable[EngineClient]] = EngineClient.start,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is used in the log, where a server has several engines."""
        self._args = args
        self._of = f" of {name}" if name else ""
        self._hang_timeout_s = hang_timeout_s
        self._start, self._sleep, self._clock = start, sleep, clock
        self._client: EngineClient
        self._running: asyncio.Task[None] | None = None
        self._delay_s = FIRST_DELAY_S
        self._load_s = 0.0
        self.death: EngineDeadError | None = None
        """Why no engine runs; None while one runs."""
        self.is_lost = False
        """Whether no engine is expected soon, because of several consecutive failed starts or a shutdown."""
        self.num_restarts = 0
        self._has_restarted: asyncio.Event | None = None
        """Set when the engine that `restart` asked for runs, or is lost; None if none was asked for."""

    async def start(self) -> Ready:
        """Start the first engine. Raises the errors of EngineClient.start."""
        began_s = self._clock()
        self._client = await self._start(self._args, self._hang_timeout_s)
        self._load_s = self._clock() - began_s
        assert self._client.ready is not None
        # Later engines keep the length resolved from "auto": positions may be scaled by it, and clients know it.
        self._args = dataclasses.replace(self._args, max_model_len=self._client.ready.max_model_len)
        return self._client.ready

    def supervise(self, *users: Supervised) -> None:
        """Start supervising the engine, and notify these users of its events."""
        self._running = asyncio.create_task(self._supervise(users))

    @property
    def is_restarting(self) -> bool:
        """Whether the engine ends, or has ended, because `restart` asked for it."""
        return self._has_restarted is not None

    @property
    def is_silent(self) -> bool:
        """Whether the engine runs, but has shown no progress for SILENT_S."""
        return self.death is None and self._client.silent_s >= SILENT_S

    @property
    def pid(self) -> int | None:
        """Process id of the engine process, or of the last one if none runs; None on another machine."""
        return self._client.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message to be sent; see `drain`. Raises EngineDeadError if no engine runs, or `to_frame`'s errors."""
        if self.death is not None:
            raise self.death
        self._client.send(message)

    async def drain(self) -> None:
        """Wait until little is left to send, or no engine runs."""
        if self.death is None:
            await self._client.drain()

    async def close(self) -> None:
        """End the engine process, even while it starts, and notify the users."""
        if self._running is None:
            await self._client.end()
            return
        self.begin_close()
        await asyncio.wait({self._running})

    async def restart(self) -> None:
        """End the engine, and wait until another one runs. Raises EngineDeadError if none can be started."""
        if self._has_restarted is None:
            self._has_restarted = asyncio.Event()
        event = self._has_restarted
        if self.death is None:
            await self._client.end()
        await event.wait()
        if self.death is not None:
            raise self.death

    def begin_close(self) -> None:
        """Let a supervised engine process end, as `close` does, without waiting for it."""
        if self._running is not None and not self._running.cancelling():
            self._running.cancel()

    async def _supervise(self, users: Sequence[Supervised]) -> None:
        try:
            while True:
                began_s = self._clock()
                await self._client.read(*[user.on_message for user in users])
                self._note_death("it has stopped answering")
                cause = await self._client.end()
                lived_s = self._clock() - began_s
                if lived_s >= HEALTHY_S:
                    self._delay_s = FIRST_DELAY_S
                if self._has_restarted is None:
                    logger.error("the engine%s ended unexpectedly after %.1f s: %s", self._of, lived_s, cause)
                death = self._note_death(cause)
                for user in users:
                    user.on_death(death)
                self._client = await self._start_another(users, cause)
                assert self._client.ready is not None
                self.death, self.is_lost = None, False
                self.num_restarts += 1
                self._end_restart()
                for user in users:
                    user.on_restart(self._client.ready)
        finally:
            self.is_lost = True
            self.death = EngineDeadError("the engine was shut down")
            self._end_restart()
            await self._client.end()
            for user in users:
                user.on_loss(self.death)

    def _end_restart(self) -> None:
        if self._has_restarted is not None:
            self._has_restarted.set()
            self._has_restarted = None

    def _note_death(self, cause: str) -> EngineDeadError:
        retry_after_s = max(1, math.ceil(self._delay_s + self._load_s))
        self.death = EngineDeadError(f"the engine is not running: {cause}; another is being started", retry_after_s)
        return self.death

    async def _start_another(self, users: Sequence[Supervised], cause: str) -> EngineClient:
        """Start engines until one is ready, after a delay that doubles each time."""
        num_failed, began_s = 0, self._clock()
        while True:
            if self._has_restarted is None or num_failed:
                delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, MAX_DELAY_S)
                logger.info("starting another engine%s in %g s", self._of, delay_s)
                await self._sleep(delay_s)
            start_s = self._clock()
            try:
                client = await self._start(self._args, self._hang_timeout_s)
            except Exception as error:  # whatever it is, the only remedy is another attempt
                num_failed += 1
                logger.error("the engine%s could not be started (attempt %d): %s", self._of, num_failed, error)
                death = self._note_death(f"{cause}, and the latest start failed ({error})"[:500])
                if num_failed >= MAX_FAILED_STARTS:
                    self._end_restart()
                if num_failed == MAX_FAILED_STARTS:
                    self.is_lost = True
                    for user in users:
                        user.on_loss(death)
            else:
                self._load_s = self._clock() - start_s
                seconds = self._clock() - began_s
                logger.info("another engine%s is running, %.1f s after the last one ended", self._of, seconds)
                return client
