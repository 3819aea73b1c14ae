"""The engines of an AsyncLLM as one: whether they run, and what is asked of all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from quire.common.errors import EngineDeadError, error_named
from quire.common.outputs import EngineStats
from quire.engine.process.messages import Action, Control, ControlDone, Event, Ready
from quire.interfaces.async_llm.adapters import EngineAdapters
from quire.interfaces.async_llm.cache_watchers import CacheWatchers
from quire.interfaces.async_llm.dispatcher import Dispatcher
from quire.interfaces.async_llm.supervisor import Supervisor
from quire.interfaces.launch.link import run_in_thread


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
        """Wake the engine up; see AsyncLLM.wake_up. If it is dead, the next one will be awake."""
        if self.is_sleeping:
            with suppress(EngineDeadError):
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

    on_loss = on_death

    def on_restart(self, ready: Ready) -> None:
        """Let the new engine sleep if the last one did."""
        if self.is_sleeping:
            self._engine.send(Control("sleep"))
            self._answers.append(unread := asyncio.get_running_loop().create_future())
            unread.cancel()


class EngineGroup:
    """One engine or several, with the same model. Each is supervised by itself."""

    def __init__(
        self,
        engines: Sequence[Supervisor],
        requests: Dispatcher,
        adapters: EngineAdapters,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Start supervising the engines, and pass their events to the requests and the adapters. `give_back` is called
        once, in a thread, when all have ended."""
        self.engines = engines
        self.watchers = [CacheWatchers(engine) for engine in engines]
        """By engine, who watches its cache."""
        self._controls = [EngineControls(engine) for engine in engines]
        self._requests = requests
        self._give_back = give_back
        parts = zip(engines, self._controls, requests.tables, self.watchers, strict=True)
        for engine, controls, table, watchers in parts:
            engine.supervise(controls, table, watchers, adapters)

    @property
    def running(self) -> list[bool]:
        """By engine, whether it runs."""
        return [engine.death is None for engine in self.engines]

    @property
    def pids(self) -> list[int | None]:
        """By engine, the id of its process, or of its last one; None on another machine."""
        return [engine.pid for engine in self.engines]

    @property
    def stats(self) -> list[EngineStats]:
        """By engine, its statistics after its latest step."""
        return [table.stats for table in self._requests.tables]

    @property
    def death(self) -> EngineDeadError | None:
        """Why no engine runs; None while one runs."""
        deaths = [engine.death for engine in self.engines]
        return None if None in deaths else deaths[0]

    @property
    def is_lost(self) -> bool:
        """Whether no engine is expected soon."""
        return all(engine.is_lost for engine in self.engines)

    @property
    def num_restarts(self) -> int:
        """Number of engines started in the place of others."""
        return sum(engine.num_restarts for engine in self.engines)

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused because an engine sleeps, or is about to."""
        return any(controls.is_sleeping for controls in self._controls)

    async def sleep(self) -> None:
        """Let all engines sleep, or none; see AsyncLLM.sleep."""
        try:
            for controls in self._controls:
                await controls.sleep()
        except Exception:
            await self.wake_up()  # those that sleep already
            raise

    async def wake_up(self) -> None:
        """Wake all engines up; see AsyncLLM.wake_up."""
        if self.is_sleeping:
            await asyncio.gather(*[controls.wake_up() for controls in self._controls])
            if self.death is not None:
                raise self.death

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests run in an engine, which then keeps its prefixes. Raises
        EngineDeadError if no engine runs."""
        if self.death is not None:
            raise self.death
        running = [controls for controls, runs in zip(self._controls, self.running, strict=True) if runs]
        return all(await asyncio.gather(*[controls.call("reset_prefix_cache") for controls in running]))

    async def restart(self, drain_timeout_s: float) -> None:
        """Replace the engines one after another; see AsyncLLM.restart_engines."""
        for table in self._requests.tables:
            await self._requests.restart(table, drain_timeout_s)

    def begin_close(self) -> None:
        """Let all engines end, without waiting for it."""
        self._requests.is_closing = True
        for engine in self.engines:
            engine.begin_close()

    async def close(self) -> None:
        """End all engines; the requests that still run fail."""
        self._requests.is_closing = True
        await asyncio.gather(*[engine.close() for engine in self.engines])
        give_back, self._give_back = self._give_back, lambda: None
        await run_in_thread(give_back)
