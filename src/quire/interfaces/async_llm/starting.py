"""The start of an engine process and the reading of its tokenizer, and an end that may be awaited or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.common.log import show_messages
from quire.config.args import EngineArgs, EngineConfig
from quire.config.model import ModelConfig
from quire.engine.process.messages import Ready
from quire.engine.requests.recommended import tokenizer_of
from quire.interfaces.async_llm.engine_client import EngineClient
from quire.interfaces.async_llm.supervisor import Supervisor
from quire.interfaces.launch.placing import place
from quire.text.tokenizer.tokenizer import Tokenizer


class LazyAwaitable(Awaitable[None]):
    """What `make` returns, if it is awaited; unlike a coroutine, it need not be."""

    def __init__(self, make: Callable[[], Awaitable[None]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, None, None]:
        return self._make().__await__()


async def nothing() -> None:
    """The end of an engine that was never started."""


async def start_engines(args: EngineArgs, hang_timeout_s: float | None, name: str = "") -> Started:
    """Start the engine processes, and read the tokenizer meanwhile. If one fails or this is cancelled, all end."""
    show_messages()
    config = await asyncio.to_thread(args.resolve)
    placed = await asyncio.to_thread(place, replace(args, lora_modules=()))  # this process knows the adapters
    engines = [
        Supervisor(
            part,
            hang_timeout_s,
            name=name if len(placed.engines) == 1 else f"{name or config.model.model}, number {number}",
            start=partial(EngineClient.start, launch=launch),
        )
        for number, (part, launch) in enumerate(placed.engines)
    ]
    try:
        async with asyncio.TaskGroup() as group:  # the first failure ends the others: weights may take minutes to load
            reading = group.create_task(asyncio.to_thread(read_tokenizer, config.model))
            starting = [group.create_task(engine.start()) for engine in engines]
    except (ExceptionGroup, asyncio.CancelledError) as failed:
        ended = [task.cancelled() or task.exception() is not None for task in starting]
        await asyncio.gather(
            *[engine.close() for engine, has_ended in zip(engines, ended, strict=True) if not has_ended]
        )
        await asyncio.to_thread(placed.close)
        raise (failed.exceptions[0] if isinstance(failed, ExceptionGroup) else failed) from None
    ready, tokenizer = [task.result() for task in starting], reading.result()
    return Started(engines, ready, config, tokenizer, placed.close)


@dataclass(frozen=True, slots=True)
class Started:
    """Engines that run, and what is known about them."""

    engines: Sequence[Supervisor]
    ready: Sequence[Ready]
    """What each has said when it was ready."""
    config: EngineConfig
    tokenizer: Tokenizer
    close: Callable[[], None] = lambda: None
    """Gives back where the engines ran, once they have ended; it blocks."""


def read_tokenizer(model: ModelConfig) -> Tokenizer:
    """Return the model's tokenizer. Raises the errors of `tokenizer_of`."""
    tokenizer = tokenizer_of(model)
    _ = tokenizer.max_token_len  # computed now, because it is slow for a large vocabulary
    return tokenizer
