"""Keeps an engine process running: starts it, and another one when it has died or hung."""

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
from quire.engine.process.messages import CacheFrame, Ready, StepDone, ToEngine
from quire.interfaces.async_llm.engine_client import EngineClient

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 10.0
"""an engine that has lived so long has not died of its start: the next one is started after the first delay again"""
MAX_FAILED_STARTS = 3
"""after so many in a row the requests that wait for an engine are given up; starting goes on"""


class Supervised(Protocol):
    """Who uses the engine. Called in the event loop."""

    def on_message(self, message: StepDone | CacheFrame) -> None:
        """The engine has sent it."""
        ...

    def on_death(self, error: EngineDeadError) -> None:
        """The engine is gone; another one is being started."""
        ...

    def on_restart(self, ready: Ready) -> None:
        """There is an engine again, which knows nothing of what the last one was told."""
        ...

    def on_loss(self, error: EngineDeadError) -> None:
        """There will be none soon, or ever."""
        ...


class Supervisor:
    """One engine process after another, of the same arguments. Between two of them `send` raises, saying why."""

    def __init__(
        self,
        args: EngineArgs,
        hang_timeout_s: float | None = None,
        *,
        start: Callable[[EngineArgs, float | None], Awaitable[EngineClient]] = EngineClient.start,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args = args
        self._hang_timeout_s = hang_timeout_s
        self._start, self._sleep, self._clock = start, sleep, clock
        self._client: EngineClient
        self._running: asyncio.Task[None] | None = None
        self._delay_s = FIRST_DELAY_S
        self._load_s = 0.0
        self.death: EngineDeadError | None = None
        """why there is no engine now"""
        self.is_lost = False
        """there will be none soon: several in a row did not even start"""
        self.num_restarts = 0

    async def start(self) -> Ready:
        """Start the first engine. Raises as EngineClient.start does."""
        began_s = self._clock()
        self._client = await self._start(self._args, self._hang_timeout_s)
        self._load_s = self._clock() - began_s
        assert self._client.ready is not None
        # What the first has made of "auto" the others keep: positions may be scaled by it, and limits were told.
        self._args = dataclasses.replace(self._args, max_model_len=self._client.ready.max_model_len)
        return self._client.ready

    def supervise(self, *users: Supervised) -> None:
        """From now on, and tell these of it."""
        self._running = asyncio.create_task(self._supervise(users))

    @property
    def pid(self) -> int:
        """The engine process's, or the last one's."""
        return self._client.pid

    def send(self, message: ToEngine) -> None:
        """Have a message sent; see `drain`. Raises EngineDeadError without an engine, and what `to_frame` does."""
        if self.death is not None:
            raise self.death
        self._client.send(message)

    async def drain(self) -> None:
        """Wait until not much is left to send, or there is no engine."""
        if self.death is None:
            await self._client.drain()

    async def close(self) -> None:
        """End the process, or the start of one. The users are told of its loss."""
        if self._running is None:
            await self._client.end()
            return
        if not self._running.cancelling():
            self._running.cancel()
        await asyncio.wait({self._running})

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
                logger.error("the engine has died after %.1f s: %s", lived_s, cause)
                death = self._note_death(cause)
                for user in users:
                    user.on_death(death)
                self._client = await self._start_another(users, cause)
                assert self._client.ready is not None
                self.death, self.is_lost = None, False
                self.num_restarts += 1
                for user in users:
                    user.on_restart(self._client.ready)
        finally:
            self.is_lost = True
            self.death = EngineDeadError("the engine was shut down")
            await self._client.end()
            for user in users:
                user.on_loss(self.death)

    def _note_death(self, cause: str) -> EngineDeadError:
        retry_after_s = max(1, math.ceil(self._delay_s + self._load_s))
        self.death = EngineDeadError(f"the engine is not running, {cause}; another is being started", retry_after_s)
        return self.death

    async def _start_another(self, users: Sequence[Supervised], cause: str) -> EngineClient:
        """After a while that doubles each time, until one starts that lives."""
        num_failed, began_s = 0, self._clock()
        while True:
            delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, MAX_DELAY_S)
            logger.info("starting another engine in %g s", delay_s)
            await self._sleep(delay_s)
            start_s = self._clock()
            try:
                client = await self._start(self._args, self._hang_timeout_s)
            except Exception as error:  # of whatever kind: to try again is all that can be done
                num_failed += 1
                logger.error("the engine could not be started (%d in a row): %s", num_failed, error)
                cause = f"{cause}, and the last that was started failed ({error})"[:500]
                death = self._note_death(cause)
                if num_failed == MAX_FAILED_STARTS:
                    self.is_lost = True
                    for user in users:
                        user.on_loss(death)
            else:
                self._load_s = self._clock() - start_s
                logger.info("the engine runs again, %.1f s after the last one ended", self._clock() - began_s)
                return client
