"""The watchers of the cache view, which the engine produces only while there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count

import msgspec

from quire.common.errors import EngineDeadError
from quire.engine.process.messages import CacheFrame, Event, ReadBlocks, Ready, SetCacheView
from quire.interfaces.async_llm.supervisor import Supervisor

_MAX_CACHE_FRAMES = 64
"""Largest number of frames that a watcher may be behind."""


class CacheWatchers:
    """Sends each frame to all watchers. They stay when an engine dies; the next engine begins with a whole snapshot."""

    def __init__(self, engine: Supervisor) -> None:
        self._engine = engine
        self._watchers: list[asyncio.Queue[bytes | None]] = []
        self._numbers = count(1)
        self._reads: dict[int, asyncio.Future[bytes]] = {}

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield frames; see AsyncLLM.watch_cache."""
        frames: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_CACHE_FRAMES)
        self._engine.send(SetCacheView(on=True))
        self._watchers.append(frames)
        try:
            while (frame := await frames.get()) is not None:
                yield frame
            if self._engine.death is not None:
                raise self._engine.death
        finally:
            if frames in self._watchers:
                self._watchers.remove(frames)
            if not self._watchers and self._engine.death is None:
                self._engine.send(SetCacheView(on=False))

    async def block_tokens(self, tier: int, block_ids: Sequence[int]) -> list[list[int]]:
        """Return the tokens in blocks; see AsyncLLM.block_tokens."""
        number = next(self._numbers)
        answer = self._reads[number] = asyncio.get_running_loop().create_future()
        try:
            self._engine.send(ReadBlocks(number, tier, list(block_ids)))
            return msgspec.msgpack.decode(await answer, type=list[list[int]])
        finally:
            del self._reads[number]

    def on_message(self, message: Event) -> None:
        """Queue a frame for every watcher, and drop watchers that do not keep up; pass tokens to their reader."""
        if not isinstance(message, CacheFrame):
            return
        if message.number:
            answer = self._reads.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.payload)
            return
        for frames in list(self._watchers):
            if frames.qsize() < _MAX_CACHE_FRAMES - 1:
                frames.put_nowait(message.payload)
            else:  # a frame is a change: a watcher that misses one cannot apply the next
                self._watchers.remove(frames)
                frames.put_nowait(None)

    def on_death(self, error: EngineDeadError) -> None:
        """Fail what was being read. Watchers wait for the next engine."""
        for answer in self._reads.values():
            if not answer.done():
                answer.set_exception(error)

    def on_restart(self, ready: Ready) -> None:
        """Turn the view on in the new engine, which begins with a whole snapshot."""
        if self._watchers:
            self._engine.send(SetCacheView(on=True))

    def on_loss(self, error: EngineDeadError) -> None:
        """End all watchers."""
        self.on_death(error)
        for frames in self._watchers:
            frames.put_nowait(None)
        self._watchers.clear()
