"""The start of an engine process and the reading of its tokenizer, and an end that may be awaited or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from typing import Any

from quire.config.args import EngineArgs, EngineConfig
from quire.engine.process.messages import Ready
from quire.interfaces.async_llm.supervisor import Supervisor
from quire.text.tokenizer.tokenizer import Tokenizer


class LazyAwaitable(Awaitable[None]):
    """What `make` returns, if it is awaited; unlike a coroutine, it need not be."""

    def __init__(self, make: Callable[[], Awaitable[None]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, None, None]:
        return self._make().__await__()


async def nothing() -> None:
    """The end of an engine that was never started."""


async def start_engine(
    args: EngineArgs, hang_timeout_s: float | None, name: str = ""
) -> tuple[Supervisor, Ready, EngineConfig, Tokenizer]:
    """Start an engine process, and read the tokenizer while it loads."""
    config = await asyncio.to_thread(args.resolve)
    engine = Supervisor(replace(args, lora_modules=()), hang_timeout_s, name=name)  # this process knows the adapters
    reading = asyncio.to_thread(read_tokenizer, config.model.tokenizer_path)
    ready, tokenizer = await asyncio.gather(engine.start(), reading, return_exceptions=True)
    if isinstance(ready, BaseException):
        raise ready
    if isinstance(tokenizer, BaseException):
        await engine.close()
        raise tokenizer
    return engine, ready, config, tokenizer


def read_tokenizer(path: Any) -> Tokenizer:
    """Return the tokenizer in this folder or file. Raises TokenizerError or CheckpointError."""
    tokenizer = Tokenizer.from_path(path)
    _ = tokenizer.max_token_len  # computed now, because it is slow for a large vocabulary
    return tokenizer
