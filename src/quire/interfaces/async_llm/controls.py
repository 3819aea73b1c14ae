"""Calls of the engine's methods from the API process: sleep, wake_up and reset_prefix_cache."""

from __future__ import annotations

import asyncio
from collections import deque

from quire.common.errors import EngineDeadError, error_named
from quire.engine.process.messages import Action, Control, ControlDone, Event, Ready
from quire.interfaces.async_llm.supervisor import Supervisor


class EngineControls:
    """Sends calls to the engine, whose answers come in the same order. Knows whether the engine sleeps."""

    def __init__(self, engine: Supervisor) -> None:
        self._engine = engine
        self._answers: deque[asyncio.Future[ControlDone]] = deque()
        self.is_sleeping = False
        """Whether requests are refused because the engine sleeps, or is about to."""

    async def call(self, action: Action) -> bool:
        """Return what the engine's method returned. Raises what it raised, or EngineDeadError."""
        self._engine.send(Control(action))
        answer: asyncio.Future[ControlDone] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        done = await answer
        if done.error_kind is not None:
            raise error_named(done.error_kind, done.error)
        return done.result

    async def sleep(self) -> None:
        """Let the engine sleep; see AsyncLLM.sleep."""
        if self.is_sleeping:
            return
        self.is_sleeping = True  # a request that came now would find no weights
        try:
            await self.call("sleep")
        except EngineDeadError:
            pass  # there is nothing to give back, and the next engine will sleep
        except Exception:
            self.is_sleeping = False
            raise

    async def wake_up(self) -> None:
        """Wake the engine up; see AsyncLLM.wake_up."""
        if self.is_sleeping:
            await self.call("wake_up")
            self.is_sleeping = False

    def on_message(self, message: Event) -> None:
        """Give an answer to the call that waits longest."""
        if isinstance(message, ControlDone):
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_result(message)

    def on_death(self, error: EngineDeadError) -> None:
        """End all calls."""
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()

    def on_restart(self, ready: Ready) -> None:
        """Let the new engine sleep if the last one did."""
        if self.is_sleeping:
            self._engine.send(Control("sleep"))
            self._answers.append(asyncio.get_running_loop().create_future())

    def on_loss(self, error: EngineDeadError) -> None:
        """End all calls."""
        self.on_death(error)
