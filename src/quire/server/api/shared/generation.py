"""Converts the engine's outputs for responses: merges several prompts, counts tokens, formats log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from quire.common.errors import RequestError
from quire.common.outputs import Logprob, RequestOutput
from quire.common.params import BeamSearchParams, SamplingParams
from quire.common.params.sampling import ALL_LOGPROBS
from quire.config.speculative import PREDICTION
from quire.engine.requests.input_processor import Prompt
from quire.server.api.shared.fields import PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob, Usage
from quire.server.http.errors import ApiError, invalid
from quire.server.http.state import engine_id
from quire.server.models.served_model import ServedModel

T = TypeVar("T")
_QUICK_LOGPROBS = 2000
"""Number of log-probabilities that are formatted within a few milliseconds."""
MAX_LOGPROBS = 2**22
"""Limit on the log-probabilities of a request with several prompts, which may take 300 bytes each until all have ended.
"""
LOWEST_LOGPROB = -9999.0
"""Replaces -inf, which JSON cannot represent."""


async def generate(
    model: ServedModel, prompts: Sequence[Prompt], params: SamplingParams | BeamSearchParams, answer_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all prompts as they arrive, each with the index of its prompt.

    Raises RequestError for an invalid request, even if the engine finds that only after it has started, and ApiError
    for an aborted one, and for one with more log-probabilities than MAX_LOGPROBS. Closing the generator aborts the
    requests that still run. If the engine ends once the first prompt was accepted, the others wait for the next engine
    with it.
    """
    streams = [
        model.llm.generate(prompt, params, engine_id(answer_id, place), lora_request=model.adapter, holds=place > 0)
        for place, prompt in enumerate(prompts)
    ]
    num_logprobs = 0

    async def counted(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        nonlocal num_logprobs
        async with aclosing(stream):
            async for output in stream:
                num_logprobs += _num_logprobs(output)
                if num_logprobs > MAX_LOGPROBS:
                    message = f"the prompts have more than {MAX_LOGPROBS:,} log-probabilities, the limit for them all: "
                    raise invalid(message + "send fewer prompts, or ask for fewer log-probabilities", "prompt")
                yield output

    if len(streams) > 1:
        streams = [counted(stream) for stream in streams]
    async with aclosing(_merged(streams)) as outputs:
        async for place, one in outputs:
            if one.error is not None:
                raise RequestError(one.error)
            if any(choice.finish_reason == "abort" for choice in one.outputs):
                raise ApiError(503, "the request was aborted", code="aborted")
            yield place, one


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they arrive, each with the index of its stream. An exception in one stream ends
    all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def drain(place: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((place, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = list[asyncio.Task[None]]()
    try:
        for place, stream in enumerate(streams):
            tasks.append(asyncio.create_task(drain(place, stream)))
            await asyncio.sleep(0)  # each prompt is encoded as it starts; other tasks run in between
        num_left = len(tasks)
        while num_left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def beside(output: RequestOutput, make: Callable[[], T]) -> T:
    """Call `make` for this output, in a thread if it has more than _QUICK_LOGPROBS log-probabilities."""
    return make() if _num_logprobs(output) <= _QUICK_LOGPROBS else await asyncio.to_thread(make)


def _num_logprobs(output: RequestOutput) -> int:
    rows = (output.prompt_logprobs, *(choice.logprobs for choice in output.outputs))
    return sum(len(some) * len(some[-1] or ()) for some in rows if some)


class TokenCounts:
    """Tokens of a request so far, over all its prompts."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_predicted = dict[int, int]()
        self._num_accepted = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0

    def add(self, place: int, output: RequestOutput) -> None:
        """Count a delta of the prompt with this index."""
        counts = len(output.prompt_token_ids), output.num_cached_tokens
        if self._prompts.get(place) != counts:
            self._prompts[place] = counts
            self.prompt_tokens, self.cached_tokens = (
                sum(column) for column in zip(*self._prompts.values(), strict=True)
            )
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._num_accepted += sum(len(choice.predicted_drafts) for choice in output.outputs)
        if output.metrics is not None and output.metrics.drafts:
            num_predicted, _ = output.metrics.drafts.get(PREDICTION, (0, 0))
            # Several samples are drafted again, and counted anew, when their engine dies.
            self._num_predicted[place] = max(num_predicted, self._num_predicted.get(place, 0))

    @property
    def predicted(self) -> tuple[int, int]:
        """Verified tokens of the prediction: those that are among the completion's tokens, and those that are not. The
        latter were wrong, of samples that are not returned, or behind the end, where the engine goes on for a while."""
        return self._num_accepted, max(0, sum(self._num_predicted.values()) - self._num_accepted)

    def usage(self) -> Usage:
        """The usage for a response body."""
        return Usage.of(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.predicted)


def token_text(token_id: int, logprob: Logprob, as_id: bool) -> str:
    """The name of a token: its text, or with `as_id` its id, which is unique."""
    return f"token_id:{token_id}" if as_id else logprob.decoded_token or ""


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(
    token_ids: Iterable[int],
    rows: Iterable[dict[int, Logprob]],
    num_top: int,
    as_ids: bool,
    token_bytes: Callable[[int], bytes],
) -> list[TokenLogprob]:
    """Log-probabilities in the format of chats: each token's own, and those of the `num_top` most likely. With `as_ids`
    tokens are named by their ids; their bytes are those of `token_bytes` nevertheless."""
    entries_of_tokens = []
    for token_id, row in zip(token_ids, rows, strict=True):
        entries = [
            TopLogprob(token_text(i, entry, as_ids), finite(entry.logprob), tuple(token_bytes(i)))
            for i, entry in row.items()
        ]
        own = row[token_id]
        if num_top != ALL_LOGPROBS:
            entries = [entry for lp, entry in zip(row.values(), entries, strict=True) if (lp.rank or 0) <= num_top]
        entries.sort(key=lambda entry: -entry.logprob)
        text, own_bytes = token_text(token_id, own, as_ids), tuple(token_bytes(token_id))
        entries_of_tokens.append(TokenLogprob(text, finite(own.logprob), own_bytes, entries))
    return entries_of_tokens


def prompt_logprobs(rows: list[dict[int, Logprob] | None] | None) -> PromptLogprobs | None:
    """A prompt's log-probabilities in the format of response bodies."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {str(i): PromptLogprob(finite(lp.logprob), lp.rank, lp.decoded_token) for i, lp in row.items()}
        for row in rows
    ]
