"""When another engine is started, how soon, and what is said meanwhile; over engines that die by the script."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from quire import AsyncLLM, EngineArgs, EngineDeadError, EngineStats, SamplingParams
from quire.common.errors import OutOfMemoryError
from quire.engine.process.messages import Abort, AddRequest, CacheFrame, Ready, SetCacheView, StepDone, ToEngine
from quire.interfaces.async_llm.starting import Started
from quire.interfaces.async_llm.supervisor import HEALTHY_S, MAX_FAILED_STARTS, Supervisor
from quire.text.tokenizer.tokenizer import Tokenizer

from .door import Door

COUNTS = dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"num_blocks": 8}
COUNTS |= {"prefix_cache": {}, "adapters": {}, "drafts": {}, "tenant_drafts": {}, "drafting_errors": {}}
SHORT = SamplingParams(max_tokens=3)


class Scripted:
    """As EngineClient; lives until `die`. It has done `num_steps` steps before anything."""

    def __init__(self, pid: int, max_model_len: int = 64) -> None:
        self.pid = pid
        self.ready = Ready(max_model_len, EngineStats(**COUNTS | {"num_steps": pid}))
        self.sent: list[ToEngine] = []
        self._dead = asyncio.Event()
        self.readers: Sequence[Callable[[Any], None]] = ()
        self.has_ended = False

    def die(self) -> None:
        self._dead.set()

    async def read(self, *readers: Callable[[Any], None]) -> None:
        self.readers = readers
        await self._dead.wait()

    def tell(self, message: StepDone | CacheFrame) -> None:
        for reader in self.readers:
            reader(message)

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def drain(self) -> None:
        pass

    async def end(self) -> str:
        self.has_ended = True
        return f"number {self.pid} has died"


class Stage:
    """A Supervisor with its clock, its sleep and its engines in the test's hands."""

    def __init__(self) -> None:
        self.now = 100.0
        self.delays: list[float] = []
        self.was_lost: list[bool] = []
        """as the delays began"""
        self.args: list[EngineArgs] = []
        self.failures: list[Exception] = []
        """what the next starts raise"""
        self.clients: list[Scripted] = []
        self.awake, self.awake_when_lost = asyncio.Event(), asyncio.Event()
        """whether delays end"""
        self.awake.set()
        self.awake_when_lost.set()
        self.supervisor = Supervisor(EngineArgs(), start=self._start, sleep=self._sleep, clock=lambda: self.now)

    async def _start(self, args: EngineArgs, hang_timeout_s: float | None) -> Scripted:
        self.args.append(args)
        if self.failures:
            raise self.failures.pop(0)
        self.clients.append(Scripted(len(self.clients)))
        return self.clients[-1]

    async def _sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.was_lost.append(self.supervisor.is_lost)
        await (self.awake_when_lost if self.supervisor.is_lost else self.awake).wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"it did not come to it, with {len(self.clients)} clients after {self.delays}")

    async def restarted(self, num_clients: int) -> None:
        await self.until(lambda: len(self.clients) == num_clients and self.supervisor.death is None)


class Listener:
    """Writes down what the users of an engine are told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def on_message(self, message: StepDone | CacheFrame) -> None:
        self.events.append(("message", ""))

    def on_death(self, error: EngineDeadError) -> None:
        self.events.append(("death", str(error)))

    def on_restart(self, ready: Ready) -> None:
        self.events.append(("restart", str(ready.stats.num_steps)))

    def on_loss(self, error: EngineDeadError) -> None:
        self.events.append(("loss", str(error)))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")


def play(scene: Callable[[Stage, Listener], Any]) -> None:
    """Run a scene with a first engine that is supervised."""

    async def run() -> None:
        stage, listener = Stage(), Listener()
        await stage.supervisor.start()
        stage.supervisor.supervise(listener)
        await scene(stage, listener)
        await stage.supervisor.close()
        assert all(client.has_ended for client in stage.clients)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_delays_double_until_an_engine_has_lived_for_a_while() -> None:
    async def scene(stage: Stage, listener: Listener) -> None:
        for number, lived_s in enumerate([0, 0, 1, 0, 0, 0, 0, 0, HEALTHY_S, 0]):
            await stage.until(lambda number=number: bool(stage.clients[number].readers))
            stage.now += lived_s
            stage.clients[number].die()
            await stage.restarted(number + 2)
        assert stage.delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1]
        assert stage.supervisor.num_restarts == 10
        assert listener.events[:2] == [
            ("death", "the engine is not running: number 0 has died; another is being started"),
            ("restart", "1"),
        ]

    play(scene)


def test_requests_between_engines_are_refused_with_a_reason_and_a_time(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage, listener: Listener) -> None:
        stage.awake.clear()
        supervisor = stage.supervisor
        supervisor.send(Abort(["a"]))
        stage.clients[0].die()
        await stage.until(lambda: bool(stage.delays))
        with pytest.raises(EngineDeadError, match="number 0 has died") as refused:
            supervisor.send(Abort(["b"]))
        assert refused.value.retry_after_s == 1
        assert not supervisor.is_lost
        stage.awake.set()
        await stage.restarted(2)
        supervisor.send(Abort(["c"]))
        assert [client.sent for client in stage.clients] == [[Abort(["a"])], [Abort(["c"])]]

    play(scene)
    lines = [record.getMessage() for record in caplog.records]
    assert any("has died" in line and "number 0 has died" in line for line in lines)
    assert any("starting another engine in 0.5 s" in line for line in lines)
    assert any("another engine is running" in line for line in lines)


def test_engines_that_do_not_start_fail_requests_but_are_started_again() -> None:
    async def scene(stage: Stage, listener: Listener) -> None:
        stage.failures = [
            OutOfMemoryError("no room"),
            EngineDeadError("gone"),
            OSError("no files"),
            RuntimeError("a bug"),
        ]
        stage.clients[0].die()
        await stage.restarted(2)
        assert [event for event, _ in listener.events] == ["death", "loss", "restart"]
        last = "number 0 has died, and the latest start failed (no files)"  # without the starts before
        assert listener.events[1][1] == f"the engine is not running: {last}; another is being started"
        assert stage.delays == [0.5, 1, 2, 4, 8]
        assert stage.was_lost == [False] * MAX_FAILED_STARTS + [True, True]
        assert not stage.supervisor.is_lost

    play(scene)


def test_a_restart_of_a_lost_engine_ends_with_the_next_attempt() -> None:
    async def scene(stage: Stage, listener: Listener) -> None:
        stage.awake_when_lost.clear()
        stage.failures = [OutOfMemoryError("no room")] * (MAX_FAILED_STARTS + 1)
        stage.clients[0].die()
        await stage.until(lambda: len(stage.was_lost) == MAX_FAILED_STARTS + 1)
        restarting = asyncio.create_task(stage.supervisor.restart())
        await asyncio.sleep(0)
        stage.awake_when_lost.set()
        stage.awake_when_lost.clear()  # the delay that runs ends, and the next one does not
        with pytest.raises(EngineDeadError, match=r"the latest start failed \(no room"):
            await asyncio.wait_for(restarting, 10)
        stage.awake_when_lost.set()
        await stage.restarted(2)

    play(scene)


def test_other_engines_have_the_context_that_the_first_had_room_for() -> None:
    async def scene(stage: Stage, listener: Listener) -> None:
        stage.clients[0].die()
        await stage.restarted(2)
        assert [args.max_model_len for args in stage.args] == [None, 64]

    play(scene)


@pytest.mark.parametrize("when", ["running", "waiting"])
def test_closing_ends_what_there_is(when: str) -> None:
    async def scene(stage: Stage, listener: Listener) -> None:
        if when == "waiting":
            stage.awake.clear()
            stage.clients[0].die()
            await stage.until(lambda: bool(stage.delays))
        await asyncio.gather(stage.supervisor.close(), stage.supervisor.close())
        assert listener.events[-1] == ("loss", "the engine was shut down")
        with pytest.raises(EngineDeadError, match="shut down"):
            stage.supervisor.send(Abort(["a"]))
        assert stage.supervisor.is_lost

    play(scene)


# Behind AsyncLLM


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(EngineArgs().resolve().model.tokenizer_path)


class StagedDoor(Door):
    """An AsyncLLM over a Stage."""

    def __init__(self, tokenizer: Tokenizer, *, holds: bool) -> None:
        self.holds = holds

        async def make() -> AsyncLLM:
            self.stage = Stage()
            ready = await self.stage.supervisor.start()
            started = Started([self.stage.supervisor], [ready], EngineArgs().resolve(), tokenizer)
            return AsyncLLM(started, holds=holds)

        super().__init__(make=make)

    async def lose_the_engine(self) -> None:
        self.stage.awake.clear()
        self.stage.clients[-1].die()
        await self.stage.until(lambda: bool(self.stage.delays))


@pytest.fixture(params=[False, True])
def door(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[StagedDoor]:
    made = StagedDoor(tokenizer, holds=request.param)
    yield made
    made.close()


def test_new_requests_are_refused_or_held_and_those_that_run_wait(door: StagedDoor) -> None:
    async def scene() -> None:
        stage, llm = door.stage, door.llm
        first = asyncio.create_task(door.outputs([5, 6], SHORT))
        await stage.until(lambda: bool(stage.clients[0].sent))
        assert llm.stats().num_steps == 0
        await door.lose_the_engine()
        assert not llm.is_running
        assert "number 0" in str(llm.death)
        assert (llm.stats().num_waiting, llm.stats().num_used_blocks) == (1, 0)
        second = asyncio.create_task(door.outputs([7], SHORT))
        await asyncio.sleep(0)
        assert second.done() != door.holds
        stage.awake.set()
        await stage.restarted(2)
        await asyncio.sleep(0)
        sent = [message.token_ids for message in stage.clients[1].sent if isinstance(message, AddRequest)]
        assert sent == ([[5, 6], [7]] if door.holds else [[5, 6]])
        assert llm.stats().num_steps == 1
        assert (llm.num_restarts, llm.num_replayed) == (1, len(sent))
        for task in (first, second):
            task.cancel()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError if door.holds else EngineDeadError)
        assert next(m for m in stage.clients[1].sent if isinstance(m, Abort)).request_ids == ["request-1"]

    door.run(scene())


def test_all_waiting_requests_fail_when_engines_do_not_start(door: StagedDoor) -> None:
    async def scene() -> None:
        stage = door.stage
        first = asyncio.create_task(door.outputs([5, 6], SHORT))
        await stage.until(lambda: bool(stage.clients[0].sent))
        stage.failures = [OSError("no processes")] * MAX_FAILED_STARTS
        await door.lose_the_engine()
        stage.awake_when_lost.clear()
        stage.awake.set()
        with pytest.raises(EngineDeadError, match="no processes"):
            await first
        with pytest.raises(EngineDeadError, match="no processes"):
            await door.outputs([7], SHORT)
        stage.awake_when_lost.set()
        await stage.restarted(2)

    door.run(scene())


def test_who_watches_the_cache_goes_on_with_a_whole_frame_of_the_next_engine(door: StagedDoor) -> None:
    async def scene() -> None:
        stage = door.stage
        frames = door.llm.watch_cache()
        first = asyncio.ensure_future(anext(frames))
        await stage.until(lambda: stage.clients[0].sent == [SetCacheView(True)] and bool(stage.clients[0].readers))
        stage.clients[0].tell(CacheFrame(b"1"))
        assert await first == b"1"
        stage.clients[0].die()
        await stage.restarted(2)
        await stage.until(lambda: stage.clients[1].sent == [SetCacheView(True)] and bool(stage.clients[1].readers))
        stage.clients[1].tell(CacheFrame(b"2"))
        assert await anext(frames) == b"2"
        last = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        await door.llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await last

    door.run(scene())
