"""An AsyncLLM that sleeps: its memory is given back, and it computes the same tokens afterwards."""

import asyncio
import gc
import os
import signal
from types import SimpleNamespace

import pytest

from quire import EngineDeadError, RequestError, SamplingParams
from quire.common.errors import OutOfMemoryError
from quire.engine.process.messages import Control, ControlDone, Ready
from quire.interfaces.async_llm.engine_group import EngineControls, EngineGroup

from .door import Door

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(40, 80))}


def anonymous_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def test_an_engine_sleeps_wakes_up_and_says_the_same():
    door = Door(kv_cache_memory="64MiB", max_num_seqs=4, num_threads=1)
    try:
        assert 64 * 2**20 <= door.llm.num_bytes < 256 * 2**20
        before = door.run(door.outputs(PROMPT, GREEDY))[-1]
        assert door.run(door.outputs(PROMPT, GREEDY))[-1].num_cached_tokens > 0
        assert door.run(door.llm.reset_prefix_cache()) is True
        assert door.run(door.outputs(PROMPT, GREEDY))[-1].num_cached_tokens == 0
        awake_kib = anonymous_kib(door.llm.engine_pid)
        door.run(door.llm.sleep())
        door.run(door.llm.sleep())
        assert door.run(door.llm.is_sleeping())
        assert door.llm.death is None
        assert anonymous_kib(door.llm.engine_pid) < awake_kib - 8 * 2**10
        with pytest.raises(RequestError, match="sleeps"):
            door.run(door.outputs(PROMPT, GREEDY))
        door.run(door.llm.wake_up())
        assert door.llm.num_restarts == 0
        after = door.run(door.outputs(PROMPT, GREEDY))[-1]
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.num_cached_tokens == 0
        door.run(asleep_while_running(door))
        door.run(dies_asleep(door))
        assert door.run(door.outputs(PROMPT, GREEDY))[-1].outputs[0].token_ids == before.outputs[0].token_ids
    finally:
        door.close()


async def asleep_while_running(door: Door) -> None:
    stream = door.llm.generate(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True), request_id="long")
    await anext(stream)
    with pytest.raises(RequestError, match="while requests run"):
        await door.llm.sleep()
    assert not await door.llm.is_sleeping()
    assert await door.llm.reset_prefix_cache() is False
    await stream.aclose()


async def dies_asleep(door: Door) -> None:
    await door.llm.sleep()
    os.kill(door.llm.engine_pid, signal.SIGKILL)
    while not door.llm.num_restarts:
        await asyncio.sleep(0.05)
    assert await door.llm.is_sleeping()
    await door.llm.wake_up()


class Sent:
    """As Supervisor."""

    def __init__(self) -> None:
        self.messages: list[Control] = []
        self.death: EngineDeadError | None = None

    def send(self, message: Control) -> None:
        if self.death is not None:
            raise self.death
        self.messages.append(message)

    def supervise(self, *users: object) -> None:
        pass


def test_an_engine_that_cannot_wake_up_still_sleeps():
    async def test() -> None:
        engine = Sent()
        controls = EngineControls(engine)
        sleeping = asyncio.create_task(controls.sleep())
        await asyncio.sleep(0)
        controls.on_message(ControlDone(True))
        await sleeping
        waking = asyncio.create_task(controls.wake_up())
        await asyncio.sleep(0)
        controls.on_message(ControlDone(False, "OutOfMemoryError", "no memory"))
        with pytest.raises(OutOfMemoryError, match="no memory"):
            await waking
        assert controls.is_sleeping
        assert engine.messages == [Control("sleep"), Control("wake_up")]

    asyncio.run(test())


def test_calls_end_with_their_engine_and_a_sleeping_one_is_followed_by_one_that_sleeps():
    async def test() -> None:
        engine, dead = Sent(), EngineDeadError("it has died")
        controls = EngineControls(engine)
        calling, cancelled = (asyncio.create_task(controls.call("reset_prefix_cache")) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        controls.on_death(dead)
        with pytest.raises(EngineDeadError):
            await calling
        engine.death = dead
        await controls.sleep()  # there is nothing to give back, and the next engine must not take it
        assert controls.is_sleeping
        engine.death = None
        controls.on_restart(Ready(1, None))
        assert engine.messages[-1] == Control("sleep")
        waking = asyncio.create_task(controls.wake_up())
        await asyncio.sleep(0)
        controls.on_message(ControlDone(True))
        controls.on_message(ControlDone(True))
        await waking
        assert not controls.is_sleeping

    asyncio.run(test())


def test_a_dead_engine_keeps_no_other_one_asleep():
    async def test() -> None:
        engines, dead = [Sent(), Sent()], EngineDeadError("it has died")
        group = EngineGroup(engines, SimpleNamespace(tables=[None, None]), None)
        first, second = group._controls
        for controls in (first, second):
            controls.is_sleeping = True
        first.on_restart(Ready(1, None))  # an engine that died asleep has been replaced
        waking = asyncio.create_task(group.wake_up())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engines[0].death = dead  # and the next one dies before it has answered
        first.on_death(dead)
        second.on_message(ControlDone(True))
        await waking
        assert not group.is_sleeping
        engines[0].death = None
        first.on_restart(Ready(1, None))
        assert [engine.messages for engine in engines] == [[Control("sleep"), Control("wake_up")], [Control("wake_up")]]
        first.is_sleeping = second.is_sleeping = True
        engines[0].death = engines[1].death = dead
        with pytest.raises(EngineDeadError):
            await group.wake_up()
        assert not group.is_sleeping
        unread = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
        gc.collect()
        assert not unread

    asyncio.run(test())
