"""Several models: which are loaded when, which sleep for others, and what requests are told meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from quire.common.errors import CheckpointError, EngineDeadError, OutOfMemoryError
from quire.config.args import EngineArgs
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError
from quire.server.models.pool import RETRY_S, ModelPool
from quire.server.models.spec import ModelSpec

BUDGET = 1000


class FakeLLM:
    """As AsyncLLM, with a memory that grows and shrinks."""

    adapters = ()

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.tokenizer = SimpleNamespace(chat_templates={})
        self.death: EngineDeadError | None = None
        self.calls: list[str] = []
        self.wakes: Exception | None = None

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        if self.wakes is not None:
            raise self.wakes
        self.calls.append("wake_up")

    async def shutdown(self) -> None:
        self.calls.append("shutdown")

    def add_listener(self, listener: Any) -> None:
        self.calls.append(f"listener {listener}")


class Stage:
    """A pool of models that need the memory that `needs` says; loading waits for `gate`."""

    def __init__(self, needs: dict[str, int], memory: int | None = BUDGET, **args: Any) -> None:
        self.needs, self.now, self.limits = needs, 100.0, list[tuple[str, Any]]()
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        specs = [ModelSpec((name, f"{name}-alias"), EngineArgs()) for name in needs]
        self.pool = ModelPool(specs, ServerArgs(model_memory=memory, **args), start=self._start, clock=lambda: self.now)
        self.a, *others = self.pool.entries
        self.b = others[0] if others else self.a

    async def _start(self, engine: EngineArgs, args: ServerArgs, name: str) -> Any:
        await self.gate.wait()
        name = name or "a"  # the only model has no name in the log
        self.limits.append((name, engine.memory_limit))
        if self.failure is not None:
            raise self.failure
        if engine.memory_limit is not None and self.needs[name] > engine.memory_limit:
            raise OutOfMemoryError("it does not fit")
        return FakeLLM(self.needs.get(name, 0))

    async def use(self, name: str) -> None:
        entry = self.pool.find(name)
        self.pool.begin_use(entry)
        try:
            await self.pool.ready(entry)
        finally:
            self.now += 1
            self.pool.end_use(entry)

    @property
    def awake(self) -> str:
        return "".join(entry.name for entry in self.pool.entries if entry.is_awake)


async def settle() -> None:
    """Let everything run that need not wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def staged(*needs: int, **args: Any) -> Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]:
    """Run a test with models a, b, c, which need this much."""

    def run(test: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
        async def in_loop() -> None:
            stage = Stage(dict(zip("abcdef", needs, strict=False)), **args)
            await asyncio.wait_for(test(stage), 60)
            await stage.pool.shutdown()
            assert all(entry.llm is None or "shutdown" in entry.llm.calls for entry in stage.pool.entries)

        asyncio.run(in_loop())

    return run


def test_a_model_is_loaded_when_it_is_used_and_stays():
    async def test(stage: Stage) -> None:
        assert [entry.status for entry in stage.pool.entries] == ["asleep", "asleep"]
        for name in ("b", "b-alias", "b:latest"):
            await stage.use(name)
        assert stage.awake == "b"
        await stage.use("a")
        assert stage.awake == "ab"
        assert stage.limits == [("b", 500), ("a", 500)]

    staged(400, 500)(test)


def test_an_unknown_name_is_a_404_that_lists_the_names():
    async def test(stage: Stage) -> None:
        assert stage.pool.find(None) is stage.a
        with pytest.raises(ApiError, match="'c' is not served here; available: a, a-alias, b, b-alias") as raised:
            stage.pool.find("c")
        assert (raised.value.status, raised.value.code) == (404, "model_not_found")

    staged(1, 1)(test)


def test_a_model_that_needs_more_than_its_share_gets_what_is_left():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        assert stage.limits == [("a", 333), ("a", 1000)]
        assert stage.awake == "a"

    staged(700, 100, 100)(test)


def test_the_least_recently_used_models_sleep_for_one_that_does_not_fit():
    async def test(stage: Stage) -> None:
        for name in ("a", "b", "a"):
            await stage.use(name)
        await stage.use("c")
        assert stage.awake == "ac"
        await stage.use("b")
        assert stage.awake == "bc"
        assert stage.b.llm.calls == ["sleep", "wake_up"]
        assert stage.a.llm.calls == ["sleep"]

    staged(300, 300, 500, memory=999)(test)


def test_a_model_in_use_does_not_sleep_and_the_other_waits():
    async def test(stage: Stage) -> None:
        stage.pool.begin_use(stage.a)
        await stage.pool.ready(stage.a)
        waiting = asyncio.create_task(stage.use("b"))
        await settle()
        assert (stage.awake, stage.b.status) == ("a", "loading")
        stage.pool.end_use(stage.a)
        await waiting
        assert stage.awake == "b"

    staged(900, 900)(test)


def test_a_request_does_not_wait_forever_for_memory():
    async def test(stage: Stage) -> None:
        stage.pool.begin_use(stage.a)
        await stage.pool.ready(stage.a)
        with pytest.raises(ApiError) as raised:
            await stage.use("b")
        assert (raised.value.status, raised.value.code) in [(503, "no_memory"), (503, "loading")]
        if stage.b.loading is not None:
            await asyncio.wait({stage.b.loading})
        errors = []
        for _ in range(2):
            with pytest.raises(ApiError) as raised:
                await stage.use("b")
            errors.append(raised.value)
        assert [error.code for error in errors] == ["no_memory"] * 2
        assert errors[0] is not errors[1]
        assert int(raised.value.headers["retry-after"]) >= 1
        assert stage.awake == "a"

    staged(900, 900, model_wait_s=0.01)(test)


def test_more_than_the_whole_budget_is_refused_without_harm():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        with pytest.raises(ApiError, match="'b' could not be loaded: it does not fit") as raised:
            await stage.use("b")
        assert (raised.value.status, raised.value.code) == (503, "model_unavailable")
        assert stage.b.status == "failed"
        await stage.use("a")
        assert stage.awake == "a"

    staged(100, 1001)(test)


def test_requests_for_a_model_that_is_loading_wait_together():
    async def test(stage: Stage) -> None:
        stage.gate.clear()
        waiting = [asyncio.create_task(stage.use("a")) for _ in range(5)]
        await settle()
        assert stage.a.status == "loading"
        stage.gate.set()
        await asyncio.gather(*waiting)
        assert len(stage.limits) == 1

    staged(100)(test)


def test_a_client_that_leaves_while_the_model_loads_leaves_nothing_behind():
    async def test(stage: Stage) -> None:
        stage.gate.clear()
        waiting = asyncio.create_task(stage.use("a"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert stage.a.num_uses == 0
        stage.gate.set()
        await stage.use("a")
        assert len(stage.limits) == 1

    staged(100)(test)


def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again_later():
    async def test(stage: Stage) -> None:
        stage.failure = CheckpointError("there is no folder 'x'")
        for _ in range(3):
            with pytest.raises(ApiError, match="'a' could not be loaded: there is no folder 'x'"):
                await stage.use("a")
        assert len(stage.limits) == 1
        stage.failure, stage.now = None, stage.now + RETRY_S
        await stage.use("a")
        assert stage.a.status == "loaded"

    staged(100)(test)


def test_a_model_that_does_not_wake_up_is_tried_again_later():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        await stage.use("b")
        assert stage.awake == "b"
        stage.a.llm.wakes = EngineDeadError("it has died")
        with pytest.raises(ApiError, match="it has died"):
            await stage.use("a")
        stage.a.llm.wakes, stage.now = None, stage.now + RETRY_S
        await stage.use("a")
        assert stage.awake == "a"

    staged(900, 900)(test)


def test_a_model_sleeps_when_it_was_not_used_for_its_time():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        assert stage.awake == "a"
        stage.pool.set_keep_alive(stage.a, 0)
        await settle()
        assert stage.awake == ""
        await stage.use("a")
        await settle()
        assert stage.awake == "a"  # the time held until the model slept
        assert stage.a.expires_at is None

    staged(100)(test)


def test_a_model_that_sleeps_already_is_not_put_to_sleep_after_its_next_use():
    async def test(stage: Stage) -> None:
        await stage.pool.unload(stage.a)
        await stage.use("a")
        await settle()
        assert stage.awake == "a"
        for _ in range(2):
            await stage.pool.unload(stage.a)
            assert stage.awake == ""
        await stage.use("a")
        await settle()
        assert stage.awake == "a"

    staged(100)(test)


def test_the_time_of_a_model_that_no_request_has_used_begins_when_it_is_loaded():
    async def test(stage: Stage) -> None:
        await stage.pool.load_first()
        await settle()
        assert (stage.awake, stage.a.llm.calls) == ("", ["sleep"])
        await stage.pool.hold_asleep([stage.a], 5)
        await stage.pool.wake_up([stage.a], all_of_them=True)
        await settle()
        assert (stage.awake, stage.a.llm.calls) == ("", ["sleep", "wake_up", "sleep"])

    staged(100, model_keep_alive_s=0.0)(test)


def test_every_model_has_the_servers_time():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        await settle()
        assert stage.awake == ""

    staged(100, model_keep_alive_s=0.0)(test)


def test_models_that_are_held_asleep_refuse_until_they_are_woken_up():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        stage.pool.begin_use(stage.a)
        holding = asyncio.create_task(stage.pool.hold_asleep(stage.pool.entries, 5))
        await asyncio.sleep(0)
        assert stage.awake == "a"  # its request still runs
        for name in ("a", "b"):
            with pytest.raises(ApiError, match="sleeps until the administrator") as raised:
                await stage.use(name)
            assert (raised.value.status, raised.value.code) == (503, "model_asleep")
        stage.pool.end_use(stage.a)
        await holding
        assert stage.awake == ""
        await stage.pool.wake_up(stage.pool.entries, all_of_them=False)
        assert stage.awake == "a"
        await stage.use("b")
        assert stage.awake == "ab"

    staged(100, 100)(test)


def test_models_stay_awake_if_their_requests_do_not_end():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        stage.pool.begin_use(stage.a)
        with pytest.raises(ApiError, match="requests still run"):
            await stage.pool.hold_asleep([stage.a], 0.01)
        await stage.pool.ready(stage.a)
        stage.pool.end_use(stage.a)

    staged(100)(test)


def test_a_model_whose_engine_is_being_restarted_is_not_loaded_again():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        stage.a.llm.death = EngineDeadError("it was ended by signal 9")
        assert stage.a.status == "restarting"
        await stage.use("a")
        assert len(stage.limits) == 1

    staged(100)(test)


def test_listeners_hear_of_models_that_are_loaded_or_added_later():
    async def test(stage: Stage) -> None:
        stage.pool.observe(lambda entry: entry.add_listener(f"of {entry.name}"))
        await stage.use("a")
        assert stage.a.llm.calls == ["listener of a"]
        stage.needs["new"] = 10
        stage.pool.add(ModelSpec(("new",), EngineArgs()))
        await stage.use("new")
        assert stage.pool.find("new").llm.calls == ["listener of new"]

    staged(100)(test)


def test_a_models_own_limit_is_its_share():
    async def in_loop() -> None:
        stage = Stage({"a": 700, "b": 100})
        stage.pool.entries[0] = stage.a = stage.pool.add(ModelSpec(("a",), EngineArgs(memory_limit=800)))
        await stage.use("b")
        await stage.use("a")
        assert stage.limits == [("b", 333), ("a", 800)]

    asyncio.run(in_loop())


def test_one_model_takes_what_the_machine_has():
    async def test(stage: Stage) -> None:
        await stage.pool.load(stage.a)
        assert stage.limits == [("a", None)]

    staged(1, memory=None)(test)


def test_a_server_of_one_model_has_a_budget_when_another_is_added():
    async def test(stage: Stage) -> None:
        await stage.use("a")
        assert stage.pool.budget_bytes is None
        stage.needs["b"] = 10
        stage.pool.add(ModelSpec(("b",), EngineArgs()))
        assert stage.pool.budget_bytes > 1
        await stage.use("b")
        assert stage.limits[1] == ("b", stage.pool.budget_bytes // 2)
        assert stage.awake == "ab"

    staged(1, memory=None)(test)
