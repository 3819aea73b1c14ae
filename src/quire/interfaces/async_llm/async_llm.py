"""AsyncLLM: the serving front door. Requests in, outputs as they come."""

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
"""characters from which on a text is encoded in a thread: less takes about a millisecond"""
HANG_TIMEOUT_S = 8.0

_T = TypeVar("_T")


class AsyncLLM:
    """Generates for many callers at once, in one event loop, over an engine in a process of its own.

    Prompts are checked and made tokens of here, and tokens are made text of here: the engine's steps wait for neither.
    """

    config: EngineConfig
    """the arguments, resolved; max_model_len is what the engine has room for"""
    model_config: ModelConfig
    tokenizer: Tokenizer

    def __init__(
        self, engine: Supervisor, ready: Ready, config: EngineConfig, tokenizer: Tokenizer, holds: bool
    ) -> None:
        """Use `from_args`."""
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
        """Start the engine process and wait until it is ready. Raises what LLM raises: ConfigError, CheckpointError,
        OutOfMemoryError; EngineDeadError if the process ends before.

        When it dies, or hangs for `hang_timeout_s`, another one is started, which goes on with the requests. New ones
        are refused meanwhile, or, with `holds`, wait too.
        """
        config = await asyncio.to_thread(args.resolve)
        engine = Supervisor(args, hang_timeout_s)
        ready, tokenizer = await asyncio.gather(
            engine.start(),
            asyncio.to_thread(_read_tokenizer, config.model.tokenizer_path),
            return_exceptions=True,
        )
        if isinstance(ready, BaseException):
            raise ready
        if isinstance(tokenizer, BaseException):
            await engine.close()
            raise tokenizer
        return cls(engine, ready, config, tokenizer, holds)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends, over SamplingParams' own defaults."""
        return recommended_params(self.model_config.generation_config)

    async def generate(self, prompt: Prompt, params: Params, *, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come, of the kind that params.output_kind says; the last is `finished`.

        Raises RequestError, before anything is queued, for a request that is wrong, and EngineDeadError where there is
        no engine, or a second one has died with it, and RequestFailedError where its own work failed here. What
        only the engine finds out, such as a grammar that is wrong, comes as the last output's `error`. Closing the
        generator aborts the request. A caller that is slow gets several steps' tokens in one output. A beam search has
        one output, at its end.
        """
        _check_params(params)
        text = _text(prompt)
        now = time.monotonic()
        with failures_named(request_id, "when it was taken in"):
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
            self._requests.leave(request)

    async def score(self, context: Prompt, continuation: Prompt | None, *, request_id: str) -> RequestOutput:
        """One output with `prompt_logprobs` of the continuation's tokens, or of the context's own without one.

        Raises as `generate`; cancelling it aborts the request.
        """
        texts = [_text(prompt) or "" for prompt in (context, continuation) if prompt is not None]
        now = time.monotonic()
        with failures_named(request_id, "when it was taken in"):
            checked = await _in_thread(
                "".join(texts), lambda: self._inputs.scoring_request(request_id, context, continuation, now)
            )
        request = self._requests.add(checked)
        try:
            await self._engine.drain()
            return await request.next_output()
        finally:
            self._requests.leave(request)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises PromptTooLongError for one that is longer than any prompt can be."""
        return await _in_thread(text, lambda: self._inputs.encode(text, add_special_tokens))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The prompt of a conversation, with `prompt` and `prompt_token_ids`, as `generate` takes it.

        Raises TokenizerError or RequestError. It takes its time with long conversations, and may run in a thread.
        """
        text = self.tokenizer.apply_chat_template(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return {"prompt": text, "prompt_token_ids": self._inputs.encode(text, add_special_tokens=False)}

    async def abort(self, request_id: str) -> None:
        """End a request now: its last output has the finish reason `abort`. Does nothing for an unknown id."""
        self._requests.abort(request_id)

    def stats(self) -> EngineStats:
        """The engine after its latest step."""
        return self._requests.stats

    def add_listener(self, listener: RequestListener) -> None:
        """Tell someone of every request from now on."""
        self._requests.listeners.append(listener)

    def watch_cache(self) -> AsyncGenerator[bytes, None]:
        """Frames of the cache view, which are made only while somebody watches. The first is a whole one, and so is
        any that comes when another watcher begins, or another engine. Raises EngineDeadError; ends for one that does
        not keep up."""
        return self._watchers.watch()

    @property
    def death(self) -> EngineDeadError | None:
        """Why there is no engine now; None while one runs."""
        return self._engine.death

    @property
    def is_running(self) -> bool:
        """There is an engine."""
        return self._engine.death is None

    @property
    def is_lost(self) -> bool:
        """There will be no engine soon, or ever: nobody waits for one."""
        return self._engine.is_lost

    @property
    def num_restarts(self) -> int:
        """Engines started after the first."""
        return self._engine.num_restarts

    @property
    def num_replayed(self) -> int:
        """Requests that went on in another engine."""
        return self._requests.num_replayed

    @property
    def engine_pid(self) -> int:
        """The engine process, for those who look at its memory."""
        return self._engine.pid

    async def shutdown(self) -> None:
        """End the engine process; requests that still run raise EngineDeadError."""
        await self._engine.close()

    # Requests


def _text(prompt: Prompt) -> str | None:
    """What is to be encoded, if anything."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and not prompt.get("prompt_token_ids") else prompt
    return text if isinstance(text, str) else None


async def _in_thread(text: str | None, make: Callable[[], _T]) -> _T:
    """What `make` returns: from a thread if it has to encode a long text."""
    return make() if text is None or len(text) < _LONG_TEXT else await asyncio.to_thread(make)


def _read_tokenizer(path: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_path(path)
    _ = tokenizer.max_token_len  # takes a moment with a large vocabulary: not with the first request
    return tokenizer


def _check_params(params: Any) -> None:
    if not isinstance(params, Params):
        raise InvalidParamsError(f"params must be SamplingParams or BeamSearchParams, not {type(params).__name__}")
    if isinstance(params, SamplingParams) and params.logits_processors:
        raise InvalidParamsError("logits_processors run in the engine's process: they can be used with LLM only")
