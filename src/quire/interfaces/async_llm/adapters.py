"""The LoRA adapters of an engine in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from itertools import count

from msgspec.structs import replace

from quire.common.errors import CheckpointError, EngineDeadError, error_named
from quire.common.lora import KnownAdapter, LoRARequest
from quire.config.args import EngineConfig
from quire.config.checkpoint.location import adapter_folder
from quire.engine.adapters import AdapterTable, AnyAdapter, refused
from quire.engine.process.messages import AdapterInspected, Event, InspectAdapter, KeepAdapters, Ready
from quire.interfaces.async_llm.supervisor import Supervisor


class EngineAdapters:
    """Keeps the table of adapters in this process, where it outlives an engine; the engine reads their files.

    Requests carry what is known of their adapters, so another engine runs them with the same content or not at all.
    """

    def __init__(self, engines: Sequence[Supervisor], config: EngineConfig) -> None:
        self._engines = engines
        self.table = AdapterTable(config.model, config.lora, on_change=self._send)
        self._numbers = count(1)
        self._answers: dict[int, tuple[Supervisor, asyncio.Future[AdapterInspected]]] = {}
        """By number, the engine that was asked, and its answer to come."""

    async def add(self, request: LoRARequest) -> KnownAdapter:
        """Add an adapter, as AdapterTable.add does. Raises EngineDeadError too."""
        self.table.check_enabled()
        folder = await asyncio.to_thread(adapter_folder, request.path)  # a relative path is this process's
        engine = next((engine for engine in self._engines if engine.death is None), self._engines[0])
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = engine, answer
        try:
            engine.send(InspectAdapter(number, replace(request, lora_path=str(folder))))
            found: AdapterInspected = await answer
        finally:
            del self._answers[number]
        if found.adapter is None:
            raise error_named(found.error_kind, found.error)
        return self.table.put(replace(found.adapter, path=request.path), replaces=request.load_inplace)

    async def of_request(self, request: AnyAdapter) -> KnownAdapter | None:
        """The adapter that a request names, which is added if need be. Raises RequestError or EngineDeadError."""
        found = self.table.known(request)
        if found is not None or not isinstance(request, LoRARequest):
            return found
        try:
            return await self.add(request)
        except CheckpointError as error:
            raise refused(request, error) from error

    def _send(self, digests: Set[str], pinned: Set[str]) -> None:
        for engine in self._engines:
            if engine.death is None:
                engine.send(KeepAdapters(frozenset(digests), frozenset(pinned)))

    def on_message(self, message: Event) -> None:
        """Give an answer to the call that waits for it."""
        if isinstance(message, AdapterInspected) and message.number in self._answers:
            _, answer = self._answers[message.number]
            if not answer.done():
                answer.set_result(message)

    def on_death(self, error: EngineDeadError) -> None:
        """End the calls that wait for an engine that does not run. The table remains."""
        for engine, answer in self._answers.values():
            if engine.death is not None and not answer.done():
                answer.set_exception(error)

    on_loss = on_death

    def on_restart(self, ready: Ready) -> None:
        """Send the adapters to keep to the new engine, which keeps none by itself, and once more to the others."""
        if digests := self.table.digests:
            self._send(digests, self.table.pinned)
