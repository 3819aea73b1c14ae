"""An engine behind a Supervisor without a process: its loop runs in a thread, and dies where a test says."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from queue import SimpleQueue
from typing import Any

import msgspec

from quire import AsyncLLM, EngineArgs, LLMEngine
from quire.engine.process.engine_process import EngineProcess
from quire.engine.process.messages import AddAny, AddMany, Ready, ToClient, ToEngine, read_frame, to_frame
from quire.interfaces.async_llm.starting import Started
from quire.interfaces.async_llm.supervisor import Supervisor

_MAX_UNREAD = 4


class _KilledError(BaseException):
    pass


class LocalClient:
    """As EngineClient, messages and all. The engine, which others have used before, dies after so many frames; None: it
    lives. It waits while _MAX_UNREAD of its messages have not been read, so that it cannot run ahead of a test."""

    pid = 1
    silent_s = 0.0

    def __init__(self, engine: LLMEngine, num_frames: int | None) -> None:
        self.ready = Ready(engine.model_config.max_model_len, engine.stats(), pooler=engine.pooler)
        self._engine = engine
        self._num_left = None if num_frames is None else num_frames + 1  # the first says that it is ready
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unread = threading.Semaphore(_MAX_UNREAD)
        self._loop = asyncio.get_running_loop()
        self._request_ids: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            EngineProcess(self._engine, self._inbox, self._take).run()
        except _KilledError:
            pass
        finally:
            for request_id in self._request_ids:
                self._engine.abort_request(request_id)
            assert self._engine.stats().num_used_blocks == 0
            self._loop.call_soon_threadsafe(self._frames.put_nowait, None)

    def _take(self, frame: bytes) -> None:
        if self._num_left == 0:
            raise _KilledError
        self._num_left = None if self._num_left is None else self._num_left - 1
        self._unread.acquire()
        self._loop.call_soon_threadsafe(self._frames.put_nowait, frame)

    async def read(self, *readers: Callable[[Any], None]) -> None:
        while (frame := await self._frames.get()) is not None:
            self._unread.release()
            message = _received(frame, ToClient)
            for reader in () if isinstance(message, Ready) else readers:
                reader(message)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, AddAny | AddMany):
            added = message.requests if isinstance(message, AddMany) else [message]
            self._request_ids += [each.request_id for each in added]
        self._inbox.put(_received(to_frame(message), ToEngine))

    async def drain(self) -> None:
        pass

    async def end(self) -> str:
        self._inbox.put(None)
        self._unread.release(1_000_000)  # nothing is read any more
        await asyncio.to_thread(self._thread.join)
        return "it died as it was told"


def _received(frame: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(read_frame(BytesIO(frame)), type=kind)


async def local_llm(
    engine: LLMEngine, deaths: Iterator[int | None], *others: LLMEngine, holds: bool = True
) -> AsyncLLM:
    """Over this engine, which is made anew whenever it dies: the first after so many frames, then the next. The others,
    if any, stand beside it and live."""

    async def no_delay(seconds: float) -> None:
        await asyncio.sleep(0)

    def supervisor(one: LLMEngine, lives: Iterator[int | None]) -> Supervisor:
        async def start(args: EngineArgs, hang_timeout_s: float | None) -> Any:
            return LocalClient(one, next(lives, None))

        return Supervisor(EngineArgs(), start=start, sleep=no_delay)

    supervisors = [supervisor(engine, deaths), *(supervisor(other, iter(())) for other in others)]
    ready = [await each.start() for each in supervisors]
    return AsyncLLM(Started(supervisors, ready, engine.plan.config, engine.tokenizer), holds=holds)
