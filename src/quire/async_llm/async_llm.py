"""AsyncLLM: the serving front door. Requests in, outputs as they come."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace as replace_fields

from quire.async_llm.engine_client import EngineClient
from quire.async_llm.listener import RequestListener
from quire.async_llm.output_processor import RequestState
from quire.config.args import EngineArgs, EngineConfig
from quire.config.model import ModelConfig
from quire.engine.input_processor import InputProcessor, Prompt, recommended_params
from quire.engine.messages import (
    Abort,
    AddRequest,
    AddScoring,
    CacheFrame,
    ProtocolError,
    RequestDelta,
    SetCacheView,
    StepDone,
)
from quire.engine.sequence import SequenceGroup
from quire.errors import EngineDeadError, InvalidParamsError, QuireError, RequestError, error_named
from quire.log import logger
from quire.outputs import EngineStats, RequestOutput
from quire.params import BeamSearchParams, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

_LONG_TEXT = 4096
"""characters from which on a text is encoded in a thread: less takes about a millisecond"""
_MAX_CACHE_FRAMES = 64
"""that a watcher may be behind"""

_T = TypeVar("_T")
Params = SamplingParams | BeamSearchParams


class AsyncLLM:
    """Generates for many callers at once, in one event loop, over an engine in a process of its own.

    Prompts are checked and made tokens of here, and tokens are made text of here: the engine's steps wait for neither.
    """

    config: EngineConfig
    """the arguments, resolved; max_model_len is what the engine has room for"""
    model_config: ModelConfig
    tokenizer: Tokenizer

    def __init__(self, client: EngineClient, config: EngineConfig, tokenizer: Tokenizer) -> None:
        """Use `from_args`."""
        model = replace(config.model, max_model_len=client.ready.max_model_len)
        self.config = replace(config, model=model)
        self.model_config = model
        self.tokenizer = tokenizer
        self._client = client
        self._inputs = InputProcessor(self.config, tokenizer)
        self._keys = itertools.count()
        self._requests: dict[int, RequestState] = {}
        self._request_ids: set[str] = set()
        self._listeners: list[RequestListener] = []
        self._watchers: list[asyncio.Queue[bytes | None]] = []
        self._stats = client.ready.stats
        client.listen(self._on_message, self._on_death)

    @classmethod
    async def from_args(cls, args: EngineArgs) -> AsyncLLM:
        """Start the engine process and wait until it is ready. Raises what LLM raises: ConfigError, CheckpointError,
        OutOfMemoryError; EngineDeadError if the process ends before."""
        config = await asyncio.to_thread(args.resolve)
        client, tokenizer = await asyncio.gather(
            EngineClient.start(args),
            asyncio.to_thread(_read_tokenizer, config.model.tokenizer_path),
            return_exceptions=True,
        )
        if isinstance(client, BaseException):
            raise client
        if isinstance(tokenizer, BaseException):
            await client.close()
            raise tokenizer
        return cls(client, config, tokenizer)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends, over SamplingParams' own defaults."""
        return recommended_params(self.model_config.generation_config)

    async def generate(self, prompt: Prompt, params: Params, *, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come, of the kind that params.output_kind says; the last is `finished`.

        Raises RequestError, before anything is queued, for a request that is wrong, and EngineDeadError. What only the
        engine finds out, such as a grammar that is wrong, comes as the last output's `error`. Closing the generator
        aborts the request. A caller that is slow gets several steps' tokens in one output. A beam search has one
        output, at its end.
        """
        _check_params(params)
        text = _text(prompt)
        now = time.monotonic()
        group = await _in_thread(text, lambda: self._inputs.request(request_id, prompt, params, 0, now))
        request = self._queue(group, params)
        try:
            await self._client.drain()
            while True:
                output = await request.next_output()
                yield output
                if output.finished:
                    return
        finally:
            self._leave(request)

    async def score(self, context: Prompt, continuation: Prompt | None, *, request_id: str) -> RequestOutput:
        """One output with `prompt_logprobs` of the continuation's tokens, or of the context's own without one.

        Raises as `generate`; cancelling it aborts the request.
        """
        texts = [_text(prompt) or "" for prompt in (context, continuation) if prompt is not None]
        now = time.monotonic()
        group = await _in_thread(
            "".join(texts), lambda: self._inputs.scoring_request(request_id, context, continuation, 0, now)
        )
        request = self._queue(group, group.params)
        try:
            await self._client.drain()
            return await request.next_output()
        finally:
            self._leave(request)

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
        for request in [request for request in self._requests.values() if request.group.request_id == request_id]:
            self._leave(request)

    def stats(self) -> EngineStats:
        """The engine after its latest step."""
        return self._stats

    def add_listener(self, listener: RequestListener) -> None:
        """Tell someone of every request from now on."""
        self._listeners.append(listener)

    async def watch_cache(self) -> AsyncGenerator[bytes, None]:
        """Frames of the cache view, which are made only while somebody watches. The first is a whole one, and so is
        any that comes when another watcher begins. Raises EngineDeadError; ends for one that does not keep up."""
        frames: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_CACHE_FRAMES)
        self._client.send(SetCacheView(on=True))
        self._watchers.append(frames)
        try:
            while (frame := await frames.get()) is not None:
                yield frame
            if self._client.death is not None:
                raise self._client.death
        finally:
            if frames in self._watchers:
                self._watchers.remove(frames)
            if not self._watchers and self.is_running:
                self._client.send(SetCacheView(on=False))

    @property
    def is_running(self) -> bool:
        """The engine process is there."""
        return self._client.death is None

    @property
    def engine_pid(self) -> int:
        """The engine process, for those who look at its memory."""
        return self._client.pid

    async def shutdown(self) -> None:
        """End the engine process; requests that still run raise EngineDeadError."""
        await self._client.close()

    # Requests

    def _queue(self, group: SequenceGroup, params: Params) -> RequestState:
        """Send a request to the engine. Raises RequestError or EngineDeadError, and sends nothing."""
        if group.request_id in self._request_ids:
            raise RequestError(f"request id {group.request_id!r} is in use by an unfinished request; choose another")
        key = next(self._keys)
        try:
            self._client.send(_message(key, group, params))
        except (OverflowError, TypeError, UnicodeError, ProtocolError) as error:
            raise InvalidParamsError(f"the request cannot be sent to the engine: {error}") from error
        request = self._requests[key] = RequestState(key, group, self.model_config)
        self._request_ids.add(group.request_id)
        self._tell("on_request_start", group.request_id, len(group.prompt_token_ids), params)
        return request

    def _leave(self, request: RequestState) -> None:
        """Abort a request, if it has not ended."""
        if request.key in self._requests:
            request.abort()
            self._end(request, is_running=True)

    def _end(self, request: RequestState, *, is_running: bool) -> None:
        """Forget a request; where it still runs in the engine, end it there."""
        del self._requests[request.key]
        self._request_ids.discard(request.group.request_id)
        if is_running and self.is_running:
            self._client.send(Abort(request.group.request_id))
        if self._listeners:
            self._tell("on_request_end", request.group.request_id, request.whole_output(), request.finish_reason)

    def _tell(self, event: str, *args: Any) -> None:
        """The listeners. One that raises, which it must not, is no reason to give up a request."""
        for listener in self._listeners:
            try:
                getattr(listener, event)(*args)
            except Exception:
                logger.exception("a listener could not be told: %s", event)

    # What the engine sends

    def _on_message(self, message: StepDone | CacheFrame) -> None:
        if isinstance(message, CacheFrame):
            self._on_cache_frame(message.payload)
            return
        self._stats, now = message.stats, time.monotonic()
        for delta in message.deltas:
            request = self._requests.get(delta.key)
            if request is None:  # aborted meanwhile
                continue
            try:
                self._update(request, delta, now)
            except Exception as error:
                logger.exception("the output of request %s could not be made", request.group.request_id)
                request.fail(QuireError(f"the output could not be made: {type(error).__name__}: {error}"))
                self._leave(request)
        self._tell("on_step", message.stats)

    def _update(self, request: RequestState, delta: RequestDelta, now: float) -> None:
        if delta.error_kind is not None:
            request.fail(error_named(delta.error_kind, delta.error or ""))
        num_tokens = request.update(delta)
        if num_tokens:
            self._tell("on_tokens", request.group.request_id, num_tokens, now)
        if request.is_finished:
            self._end(request, is_running=not delta.finished)

    def _on_cache_frame(self, frame: bytes) -> None:
        for frames in list(self._watchers):
            if frames.qsize() < _MAX_CACHE_FRAMES - 1:
                frames.put_nowait(frame)
            else:  # it could not follow without what it misses
                self._watchers.remove(frames)
                frames.put_nowait(None)

    def _on_death(self, error: EngineDeadError) -> None:
        for request in list(self._requests.values()):
            request.fail(error)
            self._end(request, is_running=False)
        for frames in self._watchers:
            frames.put_nowait(None)
        self._watchers.clear()


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


def _message(key: int, group: SequenceGroup, params: Params) -> AddRequest | AddScoring:
    token_ids, salt = group.prompt_token_ids, group.content_key.cache_salt
    if group.scores is not None and not group.seqs[0].draws:
        return AddScoring(key, group.request_id, token_ids, group.scores.first, salt)
    encoded = msgspec.Raw(msgspec.msgpack.encode(_engine_params(params)))
    is_beam_search = isinstance(params, BeamSearchParams)
    return AddRequest(key, group.request_id, token_ids, salt, group.metrics.arrival_time, is_beam_search, encoded)


def _engine_params(params: Params) -> Params:
    """What the engine has to do: it makes no text, cuts no prompt, and runs all samples without choosing any."""
    structure = params.structured_outputs
    if structure is not None and isinstance(structure.json, dict):  # JSON may be deeper than msgpack goes
        structure = replace_fields(structure, json=msgspec.json.encode(structure.json).decode())
    if isinstance(params, BeamSearchParams):
        return replace_fields(params, detokenize=False, structured_outputs=structure)
    return replace_fields(
        params,
        n=params.num_samples,
        best_of=None,
        logprobs=0 if params.ranks_samples and params.logprobs is None else params.logprobs,
        stop=None,
        detokenize=False,
        truncate_prompt_tokens=None,
        cache_salt="",
        structured_outputs=structure,
        output_kind="delta",
    )
