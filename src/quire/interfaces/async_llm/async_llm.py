"""AsyncLLM: the interface for servers, which streams the outputs of many concurrent requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.common.errors import EngineDeadError, InvalidParamsError, failures_named
from quire.common.outputs import EngineStats, RequestOutput
from quire.common.params import SamplingParams
from quire.config.args import EngineArgs, EngineConfig
from quire.config.model import ModelConfig
from quire.engine.process.messages import Ready
from quire.engine.requests.input_processor import InputProcessor, Prompt, recommended_params
from quire.interfaces.async_llm.cache_watchers import CacheWatchers
from quire.interfaces.async_llm.engine_message import Params
from quire.interfaces.async_llm.listener import RequestListener
from quire.interfaces.async_llm.request_table import RequestTable
from quire.interfaces.async_llm.supervisor import Supervisor
from quire.text.tokenizer.tokenizer import Tokenizer

_LONG_TEXT = 4096
"""Number of characters from which a text is tokenized in a thread; a shorter one takes about a millisecond."""
HANG_TIMEOUT_S = 8.0

_T = TypeVar("_T")


class AsyncLLM:
    """Serves many concurrent callers in one event loop, with an engine in a process of its own.

    Prompts are checked and tokenized, and outputs are detokenized, in this process, so the engine's steps do not wait
    for either.
    """

    config: EngineConfig
    """The resolved arguments; max_model_len is the length that fits into the engine's KV cache."""
    model_config: ModelConfig
    tokenizer: Tokenizer

    def __init__(
        self, engine: Supervisor, ready: Ready, config: EngineConfig, tokenizer: Tokenizer, holds: bool
    ) -> None:
        """Use `from_args` instead."""
        model = replace(config.model, max_model_len=ready.max_model_len)
        self.config = replace(config, model=model)
        self.model_config = model
        self.tokenizer = tokenizer
        self._engine = engine
        self._inputs = InputProcessor(self.config, tokenizer)
        self._requests = RequestTable(engine, self._inputs, ready.stats, holds=holds)
        self._watchers = CacheWatchers(engine)
        engine.supervise(self._requests, self._watchers)

    @classmethod
    async def from_args(
        cls, args: EngineArgs, *, hang_timeout_s: float | None = HANG_TIMEOUT_S, holds: bool = False
    ) -> AsyncLLM:
        """Start the engine process and wait until it is ready.

        Raises ConfigError, CheckpointError or OutOfMemoryError, as LLM does, and EngineDeadError if the process ends
        before it is ready. When the process dies, or hangs for `hang_timeout_s`, another one is started and continues
        the requests. Meanwhile new requests are rejected; with `holds` they wait for the new process.
        """
        config = await asyncio.to_thread(args.resolve)
        engine = Supervisor(args, hang_timeout_s)
        reading = asyncio.to_thread(_read_tokenizer, config.model.tokenizer_path)
        ready, tokenizer = await asyncio.gather(engine.start(), reading, return_exceptions=True)
        if isinstance(ready, BaseException):
            raise ready
        if isinstance(tokenizer, BaseException):
            await engine.close()
            raise tokenizer
        return cls(engine, ready, config, tokenizer, holds)

    def default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's recommended parameters, with SamplingParams' defaults for the rest."""
        return recommended_params(self.model_config.generation_config)

    async def generate(self, prompt: Prompt, params: Params, *, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request as params.output_kind says; the last one is `finished`.

        Raises RequestError for an invalid request before it is queued, EngineDeadError if there is no engine or two
        engines have died while running the request, and RequestFailedError for an internal error in this process.
        Errors that only the engine finds, such as an invalid grammar, are in the last output's `error`. Closing the
        generator aborts the request. A slow caller gets the tokens of several steps in one output. A beam search has a
        single output.
        """
        _check_params(params)
        text = _text(prompt)
        now = time.monotonic()
        with failures_named(request_id, "when it was added"):
            checked = await _in_thread(text, lambda: self._inputs.request(request_id, prompt, params, now))
        request = self._requests.add(checked, params)
        try:
            await self._engine.drain()
            while True:
                output = await request.next_output()
                yield output
                if output.finished:
                    return
        finally:
            self._requests.abort_request(request)

    async def score(self, context: Prompt, continuation: Prompt | None, *, request_id: str) -> RequestOutput:
        """Return an output with `prompt_logprobs` of the continuation's tokens, or of the context's if there is none.

        Raises the same errors as `generate`. Cancelling the call aborts the request.
        """
        texts = [_text(prompt) or "" for prompt in (context, continuation) if prompt is not None]
        now = time.monotonic()
        with failures_named(request_id, "when it was added"):
            checked = await _in_thread(
                "".join(texts), lambda: self._inputs.scoring_request(request_id, context, continuation, now)
            )
        request = self._requests.add(checked)
        try:
            await self._engine.drain()
            return await request.next_output()
        finally:
            self._requests.abort_request(request)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises PromptTooLongError if no prompt can be as long."""
        return await _in_thread(text, lambda: self._inputs.encode(text, add_special_tokens))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> dict[str, Any]:
        """Return a conversation's prompt as `generate` takes it; for arguments see Tokenizer.apply_chat_template.

        Raises TokenizerError or RequestError. A long conversation takes a while; this method may run in a thread.
        """
        text = self.tokenizer.apply_chat_template(messages, **template_arguments)
        return {"prompt": text, "prompt_token_ids": self._inputs.encode(text, add_special_tokens=False)}

    async def abort(self, request_id: str) -> None:
        """End a request now; its last output has the finish reason `abort`. Does nothing for an unknown id."""
        self._requests.abort(request_id)

    def stats(self) -> EngineStats:
        """Return the engine's statistics after its latest step."""
        return self._requests.stats

    def add_listener(self, listener: RequestListener) -> None:
        """Report the events of all requests to a listener from now on."""
        self._requests.listeners.append(listener)

    def watch_cache(self) -> AsyncGenerator[bytes, None]:
        """Yield frames of the cache view, which the engine makes only while at least one watcher exists.

        The first frame is a whole snapshot, and so is the frame after another watcher or another engine has started.
        Raises EngineDeadError if there is no engine. The generator ends for a watcher that does not keep up.
        """
        return self._watchers.watch()

    @property
    def death(self) -> EngineDeadError | None:
        """Why no engine runs; None while one runs."""
        return self._engine.death

    @property
    def is_running(self) -> bool:
        """Whether an engine runs."""
        return self._engine.death is None

    @property
    def is_lost(self) -> bool:
        """Whether no engine is expected soon, so that requests do not wait for one."""
        return self._engine.is_lost

    @property
    def num_restarts(self) -> int:
        """Number of engines started after the first."""
        return self._engine.num_restarts

    @property
    def num_replayed(self) -> int:
        """Number of requests that another engine has continued."""
        return self._requests.num_replayed

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process, for example to read its memory use."""
        return self._engine.pid

    async def shutdown(self) -> None:
        """End the engine process; requests that still run raise EngineDeadError."""
        await self._engine.close()


def _text(prompt: Prompt) -> str | None:
    """Return the text that must be tokenized; None if the prompt has token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and not prompt.get("prompt_token_ids") else prompt
    return text if isinstance(text, str) else None


async def _in_thread(text: str | None, make: Callable[[], _T]) -> _T:
    """Return the result of `make`, called in a thread if it tokenizes a long text."""
    return make() if text is None or len(text) < _LONG_TEXT else await asyncio.to_thread(make)


def _read_tokenizer(path: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_path(path)
    _ = tokenizer.max_token_len  # computed now, because it is slow for a large vocabulary
    return tokenizer


def _check_params(params: Any) -> None:
    if not isinstance(params, Params):
        raise InvalidParamsError(f"params must be SamplingParams or BeamSearchParams, not {type(params).__name__}")
    if isinstance(params, SamplingParams) and params.logits_processors:
        raise InvalidParamsError("logits_processors cannot be sent to the engine process: use them with LLM only")
