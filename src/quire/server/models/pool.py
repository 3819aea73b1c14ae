"""ModelPool: loads models when they are used, and puts the least recently used ones to sleep when memory is needed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.common.errors import OutOfMemoryError, QuireError
from quire.common.log import logger
from quire.config.args import EngineArgs
from quire.config.machine import format_bytes, machine_memory, parse_bytes
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError, invalid
from quire.server.models.entry import ModelEntry
from quire.server.models.served_model import ServedModel
from quire.server.models.spec import ModelSpec

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM

RETRY_S = 5.0
"""Time after a failed load in which requests get the same error, instead of another attempt."""


class ModelPool:
    """Owns the models of a server. It must be used in one event loop.

    A model is loaded when a request uses it for the first time. Weights, activations and caches of the models that are
    awake fit into a budget: if a model needs more than is left, others are put to sleep, the least recently used first,
    and never one that a request uses. One model is loaded at a time; the requests that wait for it wait together.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        args: ServerArgs,
        *,
        start: Callable[..., Awaitable[AsyncLLM]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start` makes an AsyncLLM, as AsyncLLM.from_args does. Raises ConfigError for an invalid `model_memory`."""
        self._args = args
        self._start = start or _start_engine
        self._clock = clock
        self.entries = [ModelEntry(spec, args.model_keep_alive_s) for spec in specs]
        """All models; the first one answers requests that name none."""
        self.budget_bytes = _budget(specs, args)
        """Memory for all models that are awake; None: the only model takes what the machine has left."""
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Event()  # set, and replaced, when a model was released, loaded or put to sleep
        self._tasks: set[asyncio.Task[Any]] = set()
        self._observers: list[Callable[[ModelEntry], None]] = []

    @classmethod
    def of(cls, llm: AsyncLLM, names: tuple[str, ...], args: ServerArgs) -> ModelPool:
        """A pool of one model that is loaded already."""
        pool = cls([ModelSpec(names, EngineArgs())], args)
        pool.entries[0].set_loaded(ServedModel(llm=llm, args=args))
        return pool

    def find(self, name: str | None) -> ModelEntry:
        """The model of this name, or that of the adapter of this name, or the first one for None. Raises ApiError (404)
        for a name that is not served."""
        if name is None:
            return self.entries[0]
        for entry in self.entries:
            if entry.spec.has_name(name):
                return entry
        spellings = {name, name.removesuffix(":latest")}
        for entry in self.entries:
            if not spellings.isdisjoint(entry.adapter_names):
                return entry
        raise self.not_found(name)

    def not_found(self, name: str) -> ApiError:
        """The response to a request for a model that is not served."""
        names = ", ".join(name for entry in self.entries for name in (*entry.spec.names, *entry.adapter_names))
        message = f"the model {name[:200]!r} is not served here; available: {names}"
        return ApiError(404, message, param="model", code="model_not_found")

    def check_new_name(self, name: str, owner: ModelEntry | None = None) -> None:
        """Raise ApiError (400) if the name is taken, other than by an adapter of `owner`."""
        for entry in self.entries:
            if entry.spec.has_name(name) or (entry is not owner and name in entry.adapter_names):
                message = f"the name {name[:200]!r} is taken by the model {entry.name!r} or an adapter of it"
                raise invalid(message, "name")

    def observe(self, observer: Callable[[ModelEntry], None]) -> None:
        """Call `observer` with every model, also with those that are added later."""
        self._observers.append(observer)
        for entry in self.entries:
            observer(entry)

    def add(self, spec: ModelSpec) -> ModelEntry:
        """Offer another model. A server that had only one gets a budget now: what that model uses, and what is free."""
        if self.budget_bytes is None:
            used = sum(entry.num_bytes for entry in self.entries if entry.is_awake)
            self.budget_bytes = machine_memory().for_plans(spec.engine.gpu_memory_utilization, 1, used)
        entry = ModelEntry(spec, self._args.model_keep_alive_s)
        self.entries.append(entry)
        for observer in self._observers:
            observer(entry)
        return entry

    def begin_use(self, entry: ModelEntry) -> None:
        """Keep the model awake from now on, or from when it is loaded, until `end_use`, which must follow once."""
        entry.num_uses += 1
        if entry.timer is not None:
            entry.timer.cancel()

    def end_use(self, entry: ModelEntry) -> None:
        """A request has finished its use of the model."""
        entry.num_uses -= 1
        entry.last_use_s = self._clock()
        self._notify()
        self.set_keep_alive(entry, entry.keep_alive_s)

    def set_keep_alive(self, entry: ModelEntry, keep_alive_s: float | None) -> None:
        """Put the model to sleep after this time without use; None: only when its memory is needed. This holds until
        the model sleeps."""
        entry.keep_alive_s = keep_alive_s
        if entry.timer is not None:
            entry.timer.cancel()
        if keep_alive_s is not None and entry.is_idle:
            left_s = max(0.0, entry.last_use_s + keep_alive_s - self._clock())
            entry.timer = asyncio.get_running_loop().call_later(left_s, self._expire, entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Put the model to sleep as soon as no request uses it. One that sleeps already stays as it is."""
        if not entry.is_awake and entry.loading is None:
            return  # the time would hold for the next load
        entry.keep_alive_s = 0.0
        if entry.is_idle:
            await self._put_to_sleep(entry)

    async def load_first(self) -> None:
        """Load the first model, or all with `preload_models`. Raises what loading raises."""
        for entry in self.entries[: None if self._args.preload_models else 1]:
            await self.load(entry)

    async def load(self, entry: ModelEntry) -> None:
        """Load the model, or wake it up. Raises what loading raises."""
        if not entry.is_awake and (error := await self._loading(entry)) is not None:
            raise error

    async def hold_asleep(self, entries: Sequence[ModelEntry], timeout_s: float) -> None:
        """Put models to sleep until `wake_up`, when their running requests have finished; further ones are refused.

        Raises ApiError (503) if requests still run after `timeout_s`; then nothing has changed.
        """
        others = [entry for entry in entries if entry.is_held_asleep]  # by another call, which may still wait
        entries = [entry for entry in entries if not entry.is_held_asleep]
        for entry in entries:
            entry.is_held_asleep, entry.wakes_with_others = True, entry.is_awake or entry.loading is not None
        try:
            async with asyncio.timeout(timeout_s):
                while any(entry.num_uses or entry.loading is not None for entry in entries) or any(
                    entry.is_awake and entry.is_held_asleep for entry in others
                ):
                    await self._changed.wait()
            if not all(entry.is_held_asleep for entry in others):
                raise TimeoutError
            for entry in entries:
                if entry.is_awake:
                    await self._put_to_sleep(entry)
        except BaseException as error:
            for entry in entries:
                entry.is_held_asleep = False
            self._notify()
            if isinstance(error, TimeoutError):
                message = f"requests still run after {timeout_s:g} s, so the models stay awake; try again later"
                raise ApiError(503, message, code="requests_running", headers={"retry-after": "5"}) from error
            raise

    async def wake_up(self, entries: Sequence[ModelEntry], *, all_of_them: bool) -> None:
        """Allow requests again, and load the models that were awake before, or all of them. Raises ApiError (503)."""
        held = [entry for entry in entries if entry.is_held_asleep]
        for entry in held:
            entry.is_held_asleep = False
        for entry in held:
            if entry.wakes_with_others or all_of_them:
                self.begin_use(entry)
                try:
                    await self.ready(entry)
                finally:
                    self.end_use(entry)

    async def shutdown(self) -> None:
        """End all engines; requests that still run raise EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(entry.llm.shutdown() for entry in self.entries if entry.llm is not None))

    async def ready(self, entry: ModelEntry) -> ServedModel:
        """The model when it is awake; loaded first if it is not. To be called after `begin_use`.

        Raises ApiError: 503 if it cannot be loaded, if that takes longer than `model_wait_s`, or if an administrator
        has put it to sleep.
        """
        ends_s = self._clock() + self._args.model_wait_s
        while True:
            if entry.is_held_asleep:
                message = f"the model {entry.name!r} sleeps until the administrator wakes it up"
                raise _unavailable(message, "model_asleep")
            if entry.is_awake and entry.served is not None:
                return entry.served
            error = entry.failure if self._clock() < entry.failed_s + RETRY_S else None
            if error is None:
                loading = self._loading(entry)
                await asyncio.wait({loading}, timeout=max(0.0, ends_s - self._clock()))
                if not loading.done():
                    message = f"the model {entry.name!r} was not loaded within {self._args.model_wait_s:g} s"
                    raise _unavailable(f"{message}; loading continues", "loading")
                error = loading.result()
            if isinstance(error, ApiError):  # of all requests that waited; each must have its own
                raise _unavailable(error.message, error.code or "")
            if error is not None:
                why = error if isinstance(error, QuireError) else "internal error; see the server's log"
                message = f"the model {entry.name!r} could not be loaded: {why}"
                raise _unavailable(message, "model_unavailable") from error

    def _loading(self, entry: ModelEntry) -> asyncio.Task[Exception | None]:
        """The task that loads the model, which begins now if there is none."""
        if entry.loading is None:
            entry.loading = self._begin(self._load(entry))
        return entry.loading

    async def _load(self, entry: ModelEntry) -> Exception | None:
        try:
            if entry.served is None and len(self.entries) > 1:  # a download may take long, and others need not wait
                await asyncio.to_thread(entry.spec.engine.resolve)
            async with self._one_load:
                if entry.served is None:
                    llm = await self._first_load(entry.spec)
                    entry.set_loaded(ServedModel(llm=llm, args=self._args))
                else:
                    await self._make_room(entry.num_bytes)
                    await entry.served.llm.wake_up()
                    entry.is_awake = True
        except Exception as error:
            if not isinstance(error, QuireError | ApiError):
                logger.exception("the model %s could not be loaded", entry.name)
            elif len(self.entries) > 1:
                logger.error("the model %s could not be loaded: %s", entry.name, error)
            entry.failure, entry.failed_s = error, self._clock()
            return error
        else:
            entry.failure, entry.last_use_s = None, self._clock()
            self.set_keep_alive(entry, entry.keep_alive_s)  # of a model that no request waits for
            return None
        finally:
            entry.loading = None
            self._notify()

    async def _first_load(self, spec: ModelSpec) -> AsyncLLM:
        """Start the engine with an equal share of the budget, or with all that is left if it needs more."""
        name = spec.name if len(self.entries) > 1 else ""
        if self.budget_bytes is None:
            return await self._start(spec.engine, self._args, name)
        if spec.engine.memory_limit is not None:
            await self._make_room(parse_bytes("memory_limit", spec.engine.memory_limit))
            return await self._start(spec.engine, self._args, name)
        limit_bytes = self.budget_bytes // len(self.entries)
        await self._make_room(limit_bytes)
        while True:
            try:
                return await self._start(dataclasses.replace(spec.engine, memory_limit=limit_bytes), self._args, name)
            except OutOfMemoryError:
                if limit_bytes == self.budget_bytes:
                    raise
                if limit_bytes == self._free_bytes:
                    await self._make_room(limit_bytes + 1)
                limit_bytes = self._free_bytes

    @property
    def _free_bytes(self) -> int:
        """What the models that are awake leave of the budget."""
        assert self.budget_bytes is not None
        return self.budget_bytes - sum(entry.num_bytes for entry in self.entries if entry.is_awake)

    async def _make_room(self, num_bytes: int) -> None:
        """Put models to sleep until this much memory is free. Raises OutOfMemoryError if the budget is smaller, and
        ApiError (503) if the models that would have to sleep are used for longer than `model_wait_s`."""
        if self.budget_bytes is None:
            return
        if num_bytes > self.budget_bytes:
            total = format_bytes(self.budget_bytes)
            raise OutOfMemoryError(f"it needs more than the {total} of model_memory, even without other models")
        ends_s = self._clock() + self._args.model_wait_s
        while self._free_bytes < num_bytes:
            idle = [entry for entry in self.entries if entry.is_idle]
            if idle:
                await self._put_to_sleep(min(idle, key=lambda entry: entry.last_use_s))
                continue
            try:
                async with asyncio.timeout(ends_s - self._clock()):
                    await self._changed.wait()
            except TimeoutError:
                message = "there is no memory for this model while requests use the other models; try again later"
                raise _unavailable(message, "no_memory") from None

    async def _put_to_sleep(self, entry: ModelEntry) -> None:
        assert entry.served is not None
        entry.is_awake = False  # from now on, a request loads it again
        if entry.timer is not None:
            entry.timer.cancel()
        entry.keep_alive_s = self._args.model_keep_alive_s
        try:
            await entry.served.llm.sleep()
        except Exception:
            entry.is_awake = True
            raise
        logger.info("the model %s sleeps", entry.name)
        self._notify()

    def _expire(self, entry: ModelEntry) -> None:
        if entry.is_idle:
            self._begin(self._put_to_sleep(entry))

    def _begin(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _budget(specs: Sequence[ModelSpec], args: ServerArgs) -> int | None:
    if args.model_memory is not None:
        return parse_bytes("model_memory", args.model_memory)
    return None if len(specs) == 1 else machine_memory().for_plans(specs[0].engine.gpu_memory_utilization, len(specs))


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"retry-after": str(round(RETRY_S))})


async def _start_engine(engine: Any, args: ServerArgs, name: str) -> AsyncLLM:
    from quire.interfaces.async_llm.async_llm import AsyncLLM

    return await AsyncLLM.from_args(engine, hang_timeout_s=args.hang_timeout_s, name=name)
