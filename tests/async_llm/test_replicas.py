"""Several engines behind one AsyncLLM: a request goes where its prefix is, and on in another engine if one dies."""

import asyncio
import math
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from quire import ConfigError, EngineArgs, EngineDeadError, SamplingParams
from quire.engine.routing import router
from quire.interfaces.async_llm import request_table

from .door import Door
from .test_recovery import KINDS
from .wanted import told, whole

ARGS: dict[str, Any] = {
    "data_parallel_size": 2, "num_gpu_blocks_override": 256, "max_num_seqs": 16, "num_threads": 1, "cpu_list": None,
}  # fmt: skip
ONE = SamplingParams(temperature=0, max_tokens=1)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind="delta")


@pytest.fixture(scope="module")
def shared() -> Iterator[Door]:
    door = Door(**ARGS)
    yield door
    door.close()


@pytest.fixture
def door(shared: Door) -> Iterator[Door]:
    shared.record.events.clear()
    yield shared
    shared.run(all_run(shared))
    shared.run(shared.drained())
    assert len(shared.record.of("start")) == len(shared.record.of("end"))
    assert shared.run(shared.llm.reset_prefix_cache())


@pytest.fixture
def equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines count as equally fast even if one was stalled."""
    monkeypatch.setattr(router, "SAME_KIND", math.inf)


async def all_run(door: Door) -> None:
    while any(engine.death is not None for engine in door.llm.group.engines):
        await asyncio.sleep(0.01)


def loads(door: Door) -> list[int]:
    return [len(table.requests) for table in door.llm._requests.tables]


def test_streams_of_a_killed_engine_continue_in_the_other_with_the_same_tokens(door: Door) -> None:
    wanted = [*KINDS.values(), *KINDS.values()]
    alone = door.run(door.all_outputs(wanted))
    door.record.events.clear()
    before = door.llm.num_replayed

    async def interrupt() -> tuple[list[Any], int]:
        reading = asyncio.create_task(door.all_outputs(wanted))
        await door.record.until(lambda: len(door.record.of("tokens")) >= 2 * len(wanted))
        counts, victim = loads(door), door.llm.group.engines[1]
        os.kill(victim.pid, signal.SIGKILL)
        while loads(door)[1]:
            await asyncio.sleep(0)
        return await reading, counts[1]

    got, num_moved = door.run(interrupt())
    assert num_moved >= 4
    for (_, params), one, other in zip(wanted, alone, got, strict=True):
        kind = getattr(params, "output_kind", "final_only")
        assert told(whole(other, kind)) == told(whole(one, kind))
    assert door.llm.num_replayed - before in range(1, num_moved + 1)


def test_an_engine_that_is_silent_gets_no_requests_before_it_is_given_up(door: Door) -> None:
    before = door.llm.num_restarts, door.llm.num_replayed

    async def stop() -> None:
        engine = door.llm.group.engines[1]
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            while not engine.is_silent:
                await asyncio.sleep(0.01)
            await door.all_outputs([(f"{number} is a number", ONE) for number in range(8)])
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        while engine.is_silent:
            await asyncio.sleep(0.01)

    door.run(stop())
    assert (door.llm.num_restarts, door.llm.num_replayed) == before


def test_without_any_engine_requests_wait_for_the_first_that_is_ready(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "MAX_DEATHS", 3)

    async def kill_both() -> list[Any]:
        reading = asyncio.create_task(door.all_outputs([("a", LONG)] * 4))
        await door.record.until(lambda: len(door.record.of("tokens")) >= 4)
        both_are_dead = asyncio.Event()
        for engine in door.llm.group.engines:
            monkeypatch.setattr(engine, "_sleep", lambda seconds: both_are_dead.wait())
            os.kill(engine.pid, signal.SIGKILL)
        while door.llm.is_running:
            await asyncio.sleep(0)
        assert isinstance(door.llm.death, EngineDeadError)
        both_are_dead.set()
        return await reading

    got = door.run(kill_both())
    assert [sum(len(output.outputs[0].token_ids) for output in outputs) for outputs in got] == [200] * 4


@pytest.mark.usefixtures("equally_fast")
def test_a_conversation_stays_with_the_engine_that_holds_it(door: Door) -> None:
    texts = [f"{number}: " + f"once upon a time {number} " * 30 for number in range(6)]
    first = door.run(door.all_outputs([(text, ONE) for text in texts]))
    assert all(output[-1].num_cached_tokens < 32 for output in first)
    again = door.run(door.all_outputs([(text + " and then", ONE) for text in reversed(texts)]))
    for outputs, before in zip(again, reversed(first), strict=True):
        assert outputs[-1].num_cached_tokens >= len(before[-1].prompt_token_ids) - 32


@pytest.mark.usefixtures("equally_fast")
def test_requests_without_hits_are_spread(door: Door) -> None:
    before = [stats.num_prompt_tokens for stats in door.llm.group.stats]
    wanted = [(f"{number} is a number " * 20, ONE) for number in range(40)]

    async def all_at_once() -> None:
        """No engine begins before all requests have been given to one."""
        unsent: list[Callable[[], None]] = []
        with pytest.MonkeyPatch.context() as patched:
            for engine in door.llm.group.engines:
                send = engine.send
                patched.setattr(engine, "send", lambda message, send=send: unsent.append(partial(send, message)))
            reading = asyncio.create_task(door.all_outputs(wanted))
            while sum(loads(door)) < len(wanted):
                await asyncio.sleep(0)
        for each in unsent:
            each()
        await reading

    door.run(all_at_once())
    given = [stats.num_prompt_tokens - start for stats, start in zip(door.llm.group.stats, before, strict=True)]
    assert max(given) <= 1.5 * min(given)  # what was uneven before is evened out


def test_all_engines_sleep_and_wake_up(door: Door) -> None:
    door.run(door.llm.sleep())
    assert all(controls.is_sleeping for controls in door.llm.group._controls)
    door.run(door.llm.wake_up())
    assert not door.run(door.llm.is_sleeping())
    assert len(door.run(door.all_outputs([("a", ONE)] * 4))) == 4


def test_engines_are_replaced_one_after_another_under_load(door: Door) -> None:
    wanted = [*KINDS.values(), ("b", LONG), ("c", LONG)]
    alone = door.run(door.all_outputs(wanted))
    pids, num_restarts = door.llm.group.pids, door.llm.num_restarts

    async def restart() -> list[Any]:
        reading = asyncio.create_task(door.all_outputs(wanted))
        await door.record.until(lambda: len(door.record.of("tokens")) >= len(wanted))
        await door.llm.restart_engines()
        return await reading

    got = door.run(restart())
    for (_, params), one, other in zip(wanted, alone, got, strict=True):
        kind = getattr(params, "output_kind", "final_only")
        assert told(whole(other, kind)) == told(whole(one, kind))
    assert set(door.llm.group.pids).isdisjoint(pids)
    assert door.llm.num_restarts == num_restarts + 2


def test_the_requests_of_a_single_engine_wait_for_the_new_one(door: Door) -> None:
    one = Door(**ARGS | {"data_parallel_size": 1})

    async def restart() -> Any:
        reading = asyncio.create_task(one.outputs("b", LONG))
        await one.record.until(lambda: len(one.record.of("tokens")) >= 4)
        await one.llm.restart_engines(0.01)
        return await reading

    try:
        assert told(whole(one.run(restart()), "delta")) == told(whole(door.run(door.outputs("b", LONG)), "delta"))
    finally:
        one.close()


def test_more_engines_than_cpus_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size=1000 engines of 1 threads need 1000 CPUs, and"):
        Door(data_parallel_size=1000)
    with pytest.raises(ConfigError, match="data_parallel_size=0: must be 1 to"):
        EngineArgs(data_parallel_size=0).resolve()
