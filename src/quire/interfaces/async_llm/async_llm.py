"""AsyncLLM: the interface for servers, which streams the outputs of many concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import msgspec

from quire.common.errors import EngineDeadError, RequestError
from quire.common.lora import LoRARequest
from quire.common.outputs import EngineStats, PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.common.params import PoolerInfo, PoolingParams, SamplingParams
from quire.config.args import EngineArgs, EngineConfig
from quire.config.model import ModelConfig
from quire.engine.adapters import AdapterTable, AnyAdapter
from quire.engine.requests.input_processor import InputProcessor, Prompt
from quire.engine.requests.recommended import recommended_params
from quire.interfaces.async_llm.adapters import EngineAdapters
from quire.interfaces.async_llm.dispatcher import Dispatcher
from quire.interfaces.async_llm.engine_group import EngineGroup
from quire.interfaces.async_llm.engine_message import AnyParams, Params, check_params
from quire.interfaces.async_llm.intake import Intake
from quire.interfaces.async_llm.listener import RequestListener
from quire.interfaces.async_llm.output_processor import RequestState
from quire.interfaces.async_llm.starting import LazyAwaitable, Started, nothing, read_tokenizer, start_engines
from quire.interfaces.pooling import PIECE, Pair, Tokenized, check_pooling_params, tokenized
from quire.text.tokenizer.callable_tokenizer import CallableTokenizer
from quire.text.tokenizer.tokenizer import Tokenizer

HANG_TIMEOUT_S = 8.0


class AsyncLLM:
    """Serves many concurrent callers in one event loop, with an engine in a process of its own.

    Prompts are checked and tokenized, and outputs are detokenized, in this process, so the engine's steps do not wait
    for either.
    """

    config: EngineConfig
    """The resolved arguments; max_model_len is the length that fits into the engine's KV cache."""
    model_config: ModelConfig
    tokenizer: Tokenizer
    adapters: AdapterTable
    """The LoRA adapters that requests may name."""
    _start_args: EngineArgs | None
    """The arguments of an engine that has not been started."""

    def __init__(self, started: Started, *, holds: bool) -> None:
        """Use `from_args` or `from_engine_args` instead."""
        self._start_args = None
        self._starting = asyncio.Lock()
        self._use(started, holds=holds)

    def _use(self, started: Started, *, holds: bool = False) -> None:
        engines, ready, config = started.engines, started.ready, started.config
        self.model_config = replace(config.model, max_model_len=min(state.max_model_len for state in ready))
        self.config = replace(config, model=self.model_config)
        self.tokenizer = started.tokenizer
        self._inputs = InputProcessor(self.config, started.tokenizer, ready[0].pooler)
        self._requests = Dispatcher(engines, ready, self._inputs, config.cache.block_size, holds=holds)
        self._adapters = EngineAdapters(engines, self.config)
        self.adapters = self._adapters.table
        self._intake = Intake(self._inputs, self._adapters, self._requests)
        self.num_bytes = sum(state.num_bytes for state in ready)
        """Memory that weights, activations and KV caches use while no engine sleeps, as planned."""
        self.group = EngineGroup(engines, self._requests, self._adapters, started.close)

    @classmethod
    async def from_args(
        cls, args: EngineArgs, *, hang_timeout_s: float | None = HANG_TIMEOUT_S, holds: bool = False, name: str = ""
    ) -> AsyncLLM:
        """Start the engine process and wait until it is ready.

        Raises ConfigError, CheckpointError or OutOfMemoryError, as LLM does, and EngineDeadError if the process ends
        before it is ready. When the process dies, or hangs for `hang_timeout_s`, another one is started and continues
        the requests. Meanwhile new requests are rejected; with `holds` they wait for the new process. `name` is the
        engine's in the log, if there are several.
        """
        llm = cls(await start_engines(args, hang_timeout_s, name), holds=holds)
        await llm._add_modules(args)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> AsyncLLM:
        """Check the arguments and read the tokenizer, as vLLM's method does without an event loop.

        The engine process starts with the first request, which raises the errors that `from_args` would raise. Until
        then only `config`, `model_config` and `tokenizer` can be used. vLLM's further arguments make no difference.
        """
        llm = cls.__new__(cls)
        llm.config = engine_args.resolve()
        llm.model_config = llm.config.model
        llm.tokenizer = read_tokenizer(llm.model_config)
        llm._start_args, llm._starting = engine_args, asyncio.Lock()
        return llm

    async def start(self) -> None:
        """Start the engine, if it has not been started. Raises what `from_args` raises."""
        if self._start_args is None:
            return
        async with self._starting:
            if self._start_args is not None:
                self._use(await start_engines(self._start_args, HANG_TIMEOUT_S))
                await self._add_modules(self._start_args)
                self._start_args = None

    async def _add_modules(self, args: EngineArgs) -> None:
        """Add the adapters that the arguments list. If one of them cannot be used, the engine ends."""
        try:
            for request in args.lora_requests():
                await self._adapters.add(request)
        except BaseException:
            await self.group.close()
            raise

    def default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's recommended parameters, with SamplingParams' defaults for the rest."""
        return recommended_params(self.model_config.generation_config)

    def get_tokenizer(self) -> CallableTokenizer:
        """Return the tokenizer, with the methods and defaults of transformers' tokenizers."""
        return CallableTokenizer(self.tokenizer)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params,
        request_id: str,
        *,
        lora_request: AnyAdapter = None,
        priority: int | None = None,
        holds: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request as its output_kind says; the last one is `finished`.

        `priority` replaces that of the parameters; `lora_request` names an adapter, which is added if it is new. If it
        `holds`, the request waits for an engine while none runs, instead of raising EngineDeadError.

        Raises RequestError for an invalid request before it is queued, EngineDeadError if there is no engine or two
        engines have died while running the request, and RequestFailedError for an internal error in this process.
        Errors that only the engine finds, such as an invalid grammar, are in the last output's `error`. Closing the
        generator aborts the request. A slow caller gets the tokens of several steps in one output. A beam search has a
        single output.
        """
        check_params(sampling_params)
        params = sampling_params if priority is None else msgspec.structs.replace(sampling_params, priority=priority)
        await self._begin()
        request = await self._intake.add(request_id, prompt, params, lora_request, holds=holds)
        try:
            await request.drain()
            while True:
                output = await request.next_output()
                yield output
                if output.finished:
                    return
        finally:
            self._requests.abort_requests([request])

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: AnyAdapter = None,
        priority: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the one output of a pooling request: what the model makes of a text, as the parameters' task says.

        Raises the errors of `generate`, RequestError also for what only the engine finds, such as an adapter that
        cannot be loaded, and RequestFailedError if the request's own work fails. `abort` ends it with an output that
        has an `error`. For the output under another class, see `pooling_output`; for the last argument, LLM.encode.
        """
        params = check_pooling_params(pooling_params)
        params = params if priority is None else msgspec.structs.replace(params, priority=priority)
        if tokenization_kwargs is not None:
            await self.start()
            prompt, params = await self._intake.cut(prompt, params, tokenization_kwargs)
        yield (await self.encode_many([prompt], params, [request_id], lora_request=lora_request))[0]

    async def encode_many(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams,
        request_ids: Sequence[str],
        *,
        lora_request: AnyAdapter = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the outputs of several pooling requests, as `encode` yields them. They go to the engine in few
        messages. If one fails, its error is raised, and the others are aborted, as they are if the call is cancelled;
        a request that `abort` ends does not fail the others. RequestError if there is not one id for each prompt.
        """
        params = check_pooling_params(pooling_params)
        await self._begin()
        return await self._intake.encode(request_ids, prompts, params, lora_request)

    async def pooling_prompts(
        self, given: Sequence[Prompt | Pair], pooling_params: PoolingParams, *, add_special_tokens: bool = True
    ) -> list[Tokenized]:
        """Return prompts for `encode`: texts, and pairs of texts for a cross-encoder, become token ids, cut and checked
        as the parameters say, again only if `encode` is given others. In the place of one that is wrong is its error.

        Many texts are tokenized in a thread, a few at a time, so that other requests are served meanwhile.
        """
        params, made = copy(check_pooling_params(pooling_params)), list[Tokenized]()  # the caller may change its own
        await self.start()
        for start in range(0, len(given), PIECE):
            piece = given[start : start + PIECE]
            made += await asyncio.to_thread(tokenized, self._inputs.pooling, piece, params, add_special_tokens)
        return made

    @property
    def inputs(self) -> InputProcessor:
        """Checks and tokenizes prompts."""
        return self._inputs

    @property
    def pooler(self) -> PoolerInfo | None:
        """What a pooling model can make of texts; None if the model generates."""
        return self._inputs.pooling.info

    async def score_tokens(
        self, context: Prompt, continuation: Prompt | None, *, request_id: str, lora_request: AnyAdapter = None
    ) -> RequestOutput:
        """Return an output with `prompt_logprobs` of the continuation's tokens, or of the context's if there is none.

        Raises the same errors as `generate`. Cancelling the call aborts the request.
        """
        request = await self.add_scoring(request_id, context, continuation, lora_request)
        try:
            await request.drain()
            return await request.next_output()
        finally:
            self._requests.abort_requests([request])

    async def add(
        self, request_id: str, prompt: Prompt, params: AnyParams, lora_request: AnyAdapter = None
    ) -> RequestState:
        """Send a request to an engine, for a caller that waits for its outputs. Raises what `generate` raises."""
        await self._begin()
        return await self._intake.add(request_id, prompt, params, lora_request, holds=False)

    async def add_scoring(
        self, request_id: str, context: Prompt, continuation: Prompt | None, lora_request: AnyAdapter = None
    ) -> RequestState:
        """Send a request of `score_tokens` to an engine, as `add` does."""
        await self._begin()
        return await self._intake.add_scoring(request_id, context, continuation, lora_request)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises PromptTooLongError if no prompt can be as long."""
        await self.start()
        return await self._intake.tokenize(text, add_special_tokens)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> dict[str, Any]:
        """Return a conversation's prompt as `generate` takes it; for arguments see Tokenizer.apply_chat_template.

        Raises TokenizerError or RequestError. A long conversation takes a while; this method may run in a thread.
        """
        text = self.tokenizer.apply_chat_template(messages, **template_arguments)
        return {"prompt": text, "prompt_token_ids": self._inputs.encode(text, add_special_tokens=False)}

    async def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and KV cache until `wake_up`; cached prefixes are forgotten. The process
        stays, so that waking up takes no longer than reading the weights. All `level`s are the same, as in LLM.sleep.

        Raises RequestError while requests run, and EngineDeadError if there is no engine. Meanwhile requests are
        refused, and an engine that dies is replaced by one that sleeps too.
        """
        await self.start()
        await self.group.sleep()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model again. Raises what loading raises, and it still sleeps, or EngineDeadError if none runs."""
        await self.start()
        await self.group.wake_up()

    async def is_sleeping(self) -> bool:
        """Whether weights and KV cache have been given back."""
        return self._start_args is None and self.group.is_sleeping

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Add an adapter, or with `load_inplace` replace the content of its name. Returns whether anything has changed.
        Raises RequestError, CheckpointError or EngineDeadError."""
        await self.start()
        before = self.adapters.get(lora_request.lora_name)
        return await self._adapters.add(lora_request) != before

    async def remove_lora(self, lora_id: int | str) -> bool:
        """Forget an adapter, given by id or name; requests that use it finish. Returns False if it is unknown."""
        await self.start()
        return self.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """The ids of all adapters."""
        await self.start()
        return {adapter.lora_int_id for adapter in self.adapters}

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded from its first request on, until it is removed. Returns False if it is unknown. Raises
        RequestError if no slot would be left for others."""
        await self.start()
        return self.adapters.pin(lora_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, except pinned ones. Returns False, and does nothing, while requests run."""
        await self.start()
        return await self.group.reset_prefix_cache()

    async def restart_engines(self, drain_timeout_s: float = 0.0) -> None:
        """Replace the engines' processes, one after another. An engine's requests have `drain_timeout_s` to end there;
        those that still run then continue in another engine, with the same tokens, or wait for the new one.

        Raises EngineDeadError if a new engine cannot be started; those behind it then go on as they are.
        """
        await self.start()
        await self.group.restart(drain_timeout_s)

    async def abort(self, request_id: str) -> None:
        """End a request now; its last output has the finish reason `abort`, and that of a pooling request an `error`.
        Does nothing for an unknown id."""
        if self._start_args is None:
            self._requests.abort(request_id)

    def stats(self) -> EngineStats:
        """Return the engine's statistics after its latest step."""
        return self._requests.stats()

    def add_listener(self, listener: RequestListener) -> None:
        """Report the events of all requests to a listener from now on."""
        self._requests.listeners.append(listener)

    def watch_cache(self, engine: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield frames of the cache view of an engine, which makes them only while at least one watcher exists.

        The first frame is a whole snapshot, and so is the frame after another watcher or another engine has started.
        Raises EngineDeadError if there is no engine. The generator ends for a watcher that does not keep up.
        """
        return self.group.watchers[engine].watch()

    async def block_tokens(self, tier: int, block_ids: Sequence[int], engine: int = 0) -> list[list[int]]:
        """Return the computed tokens in each of these blocks of a tier (0: the cache, 1: the host tier).

        A block that is free or does not exist has none. Raises EngineDeadError if there is no engine.
        """
        return await self.group.watchers[engine].block_tokens(tier, block_ids)

    async def _begin(self) -> None:
        """Start the engines, if they have not been started. Raises RequestError while they sleep."""
        await self.start()
        if self.group.is_sleeping:
            raise RequestError("the engine sleeps: call wake_up() first")

    @property
    def death(self) -> EngineDeadError | None:
        """Why no engine runs; None while one runs."""
        return self.group.death

    @property
    def is_running(self) -> bool:
        """Whether an engine runs."""
        return self.death is None

    @property
    def is_lost(self) -> bool:
        """Whether no engine is expected soon, so that requests do not wait for one."""
        return self.group.is_lost

    @property
    def num_restarts(self) -> int:
        """Number of engines started in the place of others."""
        return self.group.num_restarts

    @property
    def num_replayed(self) -> int:
        """Number of requests that another engine has continued."""
        return sum(table.num_replayed for table in self._requests.tables)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the first engine's process, for example to read its memory use; None on another machine."""
        return self.group.engines[0].pid

    def shutdown(self, timeout: float | None = None) -> Awaitable[None]:
        """End the engine process; requests that still run raise EngineDeadError. The end begins at once, whether the
        result is awaited or not. It takes at most a few seconds, so vLLM's `timeout` makes no difference."""
        if self._start_args is not None:
            return LazyAwaitable(nothing)
        self.group.begin_close()
        return LazyAwaitable(self.group.close)


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
