"""An AsyncLLM and the event loop it lives in, for tests that are not asynchronous themselves."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from quire import AsyncLLM, BeamSearchParams, EngineArgs, EngineStats, RequestOutput, SamplingParams
from quire.common.outputs import RequestMetrics

LIMIT_S = 120.0


class Record:
    """A listener that writes down what it is told, and can be waited with."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._told = asyncio.Event()

    def on_step(self, stats: EngineStats) -> None:
        self._told.set()

    def on_request_start(self, request_id: str, num_prompt_tokens: int, params: Any) -> None:
        self.events.append(("start", request_id, num_prompt_tokens))

    def on_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        self.events.append(("tokens", request_id, num_tokens))

    def on_request_end(
        self, request_id: str, metrics: RequestMetrics, num_cached_tokens: int, reason: str, longest: int
    ) -> None:
        self.events.append(("end", request_id, reason, metrics, num_cached_tokens))
        self._told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that comes with a step, or with the end of a request."""
        while not condition():
            self._told.clear()
            await self._told.wait()

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


class Door:
    """`run` is asyncio.run, in one loop."""

    def __init__(self, *, make: Callable[[], Coroutine[Any, Any, AsyncLLM]] | None = None, **kwargs: Any) -> None:
        """`make` makes the AsyncLLM; None: over an engine process with these arguments."""
        self.loop = asyncio.new_event_loop()
        self.record = Record()
        try:
            self.llm: AsyncLLM = self.run(AsyncLLM.from_args(EngineArgs(**kwargs)) if make is None else make())
        except BaseException:
            self._close_loop()
            raise
        self.llm.add_listener(self.record)
        self._num_requests = 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))

    def new_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    async def outputs(self, prompt: Any, params: SamplingParams | BeamSearchParams) -> list[RequestOutput]:
        return [output async for output in self.llm.generate(prompt, params, request_id=self.new_id())]

    async def all_outputs(self, requests: Sequence[tuple[Any, Any]]) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(self.outputs(prompt, params) for prompt, params in requests))

    async def drained(self) -> None:
        """Until the engine holds nothing."""
        await self.record.until(lambda: (s := self.llm.stats()).num_used_blocks + s.num_waiting + s.num_running == 0)

    def close(self) -> None:
        self.run(self.llm.shutdown())
        self._close_loop()

    def _close_loop(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
