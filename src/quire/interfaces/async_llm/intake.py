"""How requests reach the dispatcher: they are checked, and long texts are tokenized in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.common.errors import RequestError, failures_named
from quire.common.outputs import PoolingOutput, PoolingRequestOutput
from quire.common.params import PoolingParams
from quire.engine.adapters import AnyAdapter
from quire.engine.requests.input_processor import CheckedRequest, InputProcessor, Prompt
from quire.interfaces.async_llm.adapters import EngineAdapters
from quire.interfaces.async_llm.dispatcher import Dispatcher
from quire.interfaces.async_llm.engine_message import AnyParams
from quire.interfaces.async_llm.output_processor import RequestState
from quire.interfaces.pooling import VECTORS, pooling_output, pooling_params, tokenization, tokenized

_LONG_TEXT = 4096
"""Number of characters from which a text is tokenized in a thread; a shorter one takes about a millisecond."""
_AT_ONCE = 64
"""Number of texts that are checked and sent at once, which takes a few milliseconds."""

_T = TypeVar("_T")


class Intake:
    """Checks requests and adds them. Raises RequestError and EngineDeadError, as AsyncLLM does."""

    def __init__(self, inputs: InputProcessor, adapters: EngineAdapters, requests: Dispatcher) -> None:
        self._inputs = inputs
        self._adapters = adapters
        self._requests = requests

    async def add(
        self, request_id: str, prompt: Prompt, params: AnyParams, lora_request: AnyAdapter, *, holds: bool
    ) -> RequestState:
        """Send one request to the engine; if it `holds`, it waits for one while none runs."""
        return (await self._add([request_id], [prompt], params, lora_request, asyncio.Event(), holds))[0]

    async def add_scoring(
        self, request_id: str, context: Prompt, continuation: Prompt | None, lora_request: AnyAdapter
    ) -> RequestState:
        """Send a request to the engine that is only scored."""
        now = time.monotonic()
        with failures_named(request_id, "when it was added"):
            adapter = await self._adapters.of_request(lora_request)
            checked = await _in_thread(
                [prompt for prompt in (context, continuation) if prompt is not None],
                lambda: self._inputs.scoring_request(request_id, context, continuation, now, adapter),
            )
        return self._requests.add([checked], None, asyncio.Event())[0]

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        return await _in_thread([text], lambda: self._inputs.encode(text, add_special_tokens))

    async def cut(self, prompt: Prompt, params: PoolingParams, given: Any) -> tuple[Prompt, PoolingParams]:
        """Return the prompt as vLLM's `tokenization_kwargs` ask for, and parameters that say so."""
        values, adds_special_tokens = tokenization(given, None)
        (params,) = pooling_params(params, None, values, 1)
        (made,) = await _in_thread(
            [prompt], lambda: tokenized(self._inputs.pooling, [prompt], params, adds_special_tokens)
        )
        if isinstance(made, Exception):
            raise made
        return made, params

    async def encode(
        self, request_ids: Sequence[str], prompts: Sequence[Prompt], params: PoolingParams, lora_request: AnyAdapter
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what is pooled from the prompts. If one fails, the others are aborted and its error is raised."""
        if len(request_ids) != len(prompts):
            message = f"{len(request_ids)} request_ids for {len(prompts)} prompts: give one id for each prompt"
            raise RequestError(message)
        requests, changed = list[RequestState](), asyncio.Event()
        try:
            for start in range(0, len(prompts), _AT_ONCE):
                piece = slice(start, start + _AT_ONCE)
                # what follows an accepted piece waits with it, if the engine ends meanwhile
                requests += await self._add(
                    request_ids[piece], prompts[piece], params, lora_request, changed, start > 0
                )
                await self._requests.drain()
                await asyncio.sleep(0)  # other requests are served meanwhile
            while any(not request.is_finished for request in requests):
                await changed.wait()
                changed.clear()
                for request in requests:
                    request.raise_failure()
            return [pooling_output(await request.output(), *VECTORS) for request in requests]
        finally:
            self._requests.abort_requests(requests)

    async def _add(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: AnyParams,
        lora_request: AnyAdapter,
        changed: asyncio.Event,
        holds: bool,
    ) -> list[RequestState]:
        now = time.monotonic()
        with failures_named(request_ids[0], "when it was added"):
            adapter = await self._adapters.of_request(lora_request)

        def check() -> list[CheckedRequest]:
            made = []
            for request_id, prompt in zip(request_ids, prompts, strict=True):
                with failures_named(request_id, "when it was added"):
                    made.append(self._inputs.request(request_id, prompt, params, now, adapter))
            return made

        checked = await _in_thread([*prompts, getattr(params, "prediction", None) or ""], check)
        return self._requests.add(checked, params, changed, holds=holds)


async def _in_thread(prompts: Sequence[Prompt], make: Callable[[], _T]) -> _T:
    """Return the result of `make`, called in a thread if it tokenizes a long text."""
    num_chars = sum([len(_text(prompt)) for prompt in prompts])
    return make() if num_chars < _LONG_TEXT else await asyncio.to_thread(make)


def _text(prompt: Prompt) -> str:
    """Return the text that must be tokenized; an empty one if the prompt has token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and not prompt.get("prompt_token_ids") else prompt
    return text if isinstance(text, str) else ""
