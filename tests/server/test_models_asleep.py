"""Models that an administrator puts to sleep by several requests at once."""

import asyncio

import pytest

from quire.server.http.errors import ApiError
from tests.server.test_models import Stage, settle, staged


def test_a_second_call_waits_until_the_models_sleep():
    async def test(stage: Stage) -> None:
        await stage.use("b")
        stage.pool.begin_use(stage.b)
        calls = [asyncio.create_task(stage.pool.hold_asleep(stage.pool.entries, 60)) for _ in range(2)]
        await settle()
        assert not any(call.done() for call in calls)
        stage.pool.end_use(stage.b)
        await asyncio.gather(*calls)
        assert stage.awake == ""
        assert stage.b.llm.calls == ["sleep"]

    staged(100, 100)(test)


def test_a_second_call_fails_with_the_first():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        stage.pool.begin_use(stage.a)
        first = asyncio.create_task(stage.pool.hold_asleep([stage.a], 60))
        await settle()
        second = asyncio.create_task(stage.pool.hold_asleep(stage.pool.entries, 60))
        await settle()
        first.cancel()
        with pytest.raises(ApiError, match="requests still run"):
            await second
        assert not any(entry.is_held_asleep for entry in stage.pool.entries)
        stage.pool.end_use(stage.a)

    staged(100, 100)(test)
