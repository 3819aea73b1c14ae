"""Several engines in processes of their own, for LLM, which adds and steps requests as with one in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from quire.common import liveness
from quire.common.errors import ConfigError, QuireError, RequestError
from quire.common.outputs import RequestOutput
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.config.args import EngineArgs
from quire.engine.adapters import AnyAdapter
from quire.engine.metrics import EngineMetrics, Metric
from quire.engine.requests.input_processor import Prompt
from quire.interfaces.async_llm.async_llm import AsyncLLM
from quire.interfaces.async_llm.output_processor import RequestState
from quire.kv.prefix_cache.pins import PinnedPrefix
from quire.text.tokenizer.tokenizer import Tokenizer

_TICK_S = 0.1
"""How long `step` waits for outputs, so that an interrupt is noticed."""
_T = TypeVar("_T")


class EngineProcesses:
    """The engines of `data_parallel_size`, with the methods of LLMEngine that LLM needs. Used by one thread.

    They are supervised as those of a server: a request whose engine dies continues in another one.
    """

    grammars = ()
    """Requests that wait for their grammars; engines in other processes do not report them."""

    def __init__(self, args: EngineArgs) -> None:
        """Raises ConfigError, CheckpointError or OutOfMemoryError."""
        self._loop = loop = asyncio.new_event_loop()
        starting = loop.create_task(AsyncLLM.from_args(args, holds=True))
        thread = threading.Thread(target=loop.run_forever, name="engines-of-llm", daemon=True)
        self._finalizer = liveness.Finalizer(self, _close, starting, loop, thread)
        thread.start()
        self.in_use = threading.Lock()
        self._outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        self._reading: dict[str, asyncio.Task[None]] = {}
        try:
            self._llm: AsyncLLM = self._run(asyncio.wait_for, starting, None)
        except BaseException:
            self.close()
            raise
        self._metrics = EngineMetrics(self._llm.model_config.model) if self._llm.config.measures_requests else None
        if self._metrics is not None:
            self._llm.add_listener(self._metrics)
        # LLM reads these of an LLMEngine, too.
        self.config, self.tokenizer = self._llm.config, self._llm.tokenizer
        self.inputs, self.pooler, self.stats = self._llm.inputs, self._llm.pooler, self._llm.stats
        self.get_tokenizer = self._llm.get_tokenizer
        self.default_sampling_params = self._llm.default_sampling_params

    def _run(self, call: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
        self._finalizer.check()
        return asyncio.run_coroutine_threadsafe(call(*args), self._loop).result()

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the engines; None on another machine."""
        return self._llm.group.pids

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        lora_request: AnyAdapter = None,
    ) -> None:
        """Send a request to an engine. Raises what AsyncLLM.add raises."""
        self._run(self._begin, self._llm.add, request_id, prompt, params, lora_request)

    def add_scoring_request(
        self, request_id: str, context: Prompt, continuation: Prompt | None, *, lora_request: AnyAdapter = None
    ) -> None:
        """Send a request that scores tokens to an engine. Raises what AsyncLLM.add_scoring raises."""
        self._run(self._begin, self._llm.add_scoring, request_id, context, continuation, lora_request)

    async def _begin(self, add: Callable[..., Coroutine[Any, Any, RequestState]], *args: Any) -> None:
        request = await add(*args)
        request_id = request.message.request_id
        self._reading[request_id] = asyncio.create_task(self._read(request))

    async def _read(self, request: RequestState) -> None:
        """Wait for the request's last output."""
        try:
            await request.drain()
            self._outputs.put(await request.next_output())
        except QuireError as error:
            self._outputs.put(request.failed_output(error))
        finally:
            del self._reading[request.message.request_id]

    def step(self) -> list[RequestOutput]:
        """Wait a moment for outputs, and return them; there may be none."""
        outputs: list[RequestOutput] = []
        try:
            outputs.append(self._outputs.get(timeout=_TICK_S))
            while True:
                outputs.append(self._outputs.get_nowait())
        except Empty:
            return outputs

    def abort_request(self, request_id: str) -> None:
        """Abort a request, if it still runs."""

        async def abort() -> None:
            if (reading := self._reading.get(request_id)) is not None:
                reading.cancel()
            await self._llm.abort(request_id)

        self._run(abort)

    def has_unfinished_requests(self) -> bool:
        """Whether a request runs, or has an output that `step` will return."""
        return bool(self._reading) or not self._outputs.empty()  # in this order: `_read` puts before it deletes

    def is_sleeping(self) -> bool:
        """Whether an engine has given back the memory of weights and KV cache."""
        return self._llm.group.is_sleeping

    def get_metrics(self) -> list[Metric]:
        """The current metrics, of each engine. Raises ConfigError if requests are not measured."""
        if self._metrics is None:
            raise ConfigError("requests are not measured: make the LLM with disable_log_stats=False")
        return list(self._metrics.snapshot(self._llm.group.stats, self.config.cache, self.config.lora))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. Returns False while requests run. Raises RequestError if they are to be reset."""
        if reset_running_requests:
            raise RequestError("requests in other processes cannot be reset: wait for them, or abort them")
        return self._run(self._llm.reset_prefix_cache)

    def sleep(self) -> None:
        """Give back the memory of weights and KV caches until `wake_up`. Raises RequestError while requests run."""
        self._run(self._llm.sleep)

    def wake_up(self) -> None:
        """Load the model again. Raises what loading raises."""
        self._run(self._llm.wake_up)

    def check_pin(self, prompt: Prompt, lora_request: AnyAdapter) -> NoReturn:
        """Raise RequestError: a pinned prefix would have to lie in every engine."""
        raise RequestError("prefixes are pinned in one engine only: use data_parallel_size=1")

    pin_prefix = check_pin

    def unpin_prefix(self, pin: PinnedPrefix) -> None:
        """Raise RequestError, as no prefix is pinned."""
        raise RequestError("no prefix is pinned, because there are several engines")

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise RequestError: the engines have read theirs."""
        raise RequestError("engines in other processes keep their tokenizer: give `tokenizer` when the LLM is made")

    def close(self) -> None:
        """End the engines; requests that still run fail."""
        self._finalizer()


def _close(starting: asyncio.Task[AsyncLLM], loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the engines, even while they start, and their event loop."""
    try:
        asyncio.run_coroutine_threadsafe(_shut_down(starting), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _shut_down(starting: asyncio.Task[AsyncLLM]) -> None:
    starting.cancel()  # which changes nothing once the engines run
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().shutdown()
