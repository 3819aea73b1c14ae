"""The start of an engine process and the reading of its tokenizer, and an end that may be awaited or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.config.args import EngineArgs, EngineConfig
from quire.engine.process.messages import Ready
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
    """Start the engine processes, and read the tokenizer while they load. If one fails, all end."""
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
    reading = asyncio.to_thread(read_tokenizer, config.model.tokenizer_path)
    tokenizer, *states = await asyncio.gather(reading, *[engine.start() for engine in engines], return_exceptions=True)
    ready = [state for state in states if isinstance(state, Ready)]
    failures = [result for result in (*states, tokenizer) if isinstance(result, BaseException)]
    if not isinstance(tokenizer, Tokenizer) or failures:
        running = [engine for engine, state in zip(engines, states, strict=True) if isinstance(state, Ready)]
        await asyncio.gather(*[engine.close() for engine in running])
        await asyncio.to_thread(placed.close)
        raise failures[0]
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


def read_tokenizer(path: Any) -> Tokenizer:
    """Return the tokenizer in this folder or file. Raises TokenizerError or CheckpointError."""
    tokenizer = Tokenizer.from_path(path)
    _ = tokenizer.max_token_len  # computed now, because it is slow for a large vocabulary
    return tokenizer
