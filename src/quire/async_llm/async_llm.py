"""AsyncLLM: the serving front door. Requests in, outputs as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from quire.async_llm.listener import RequestListener
from quire.config.args import EngineArgs, EngineConfig
from quire.config.model import ModelConfig
from quire.engine.input_processor import Prompt, recommended_params
from quire.outputs import EngineStats, RequestOutput
from quire.params import BeamSearchParams, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer


class AsyncLLM:
    """Generates for many callers at once, in one event loop, over an engine in a process of its own.

    Prompts are checked and made tokens of here, and tokens are made text of here: the engine's steps wait for neither.
    """

    config: EngineConfig
    """the arguments, resolved; max_model_len is what the engine has room for"""
    model_config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    async def from_args(cls, args: EngineArgs) -> AsyncLLM:
        """Start the engine process and wait until it is ready. Raises what LLM raises: ConfigError, CheckpointError,
        OutOfMemoryError; EngineDeadError if the process ends before."""
        raise NotImplementedError

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends, over SamplingParams' own defaults."""
        return recommended_params(self.model_config.generation_config)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, *, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request as they come, of the kind that params.output_kind says; the last is `finished`.

        Raises RequestError, before anything is queued, for a request that is wrong, and EngineDeadError. Closing the
        generator aborts the request. A caller that is slow gets several steps' tokens in one output.
        """
        raise NotImplementedError
        yield

    async def score(self, context: Prompt, continuation: Prompt | None, *, request_id: str) -> RequestOutput:
        """One output with `prompt_logprobs` of the continuation's tokens, or of the context's own without one."""
        raise NotImplementedError

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises PromptTooLongError for one that is longer than any prompt can be."""
        raise NotImplementedError

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
        """The prompt of a conversation, with `prompt` and `prompt_token_ids`, as `generate` takes it."""
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """End a request now: its generator gives a last output with the finish reason `abort`. Unknown ids do nothing."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """The engine after its latest step."""
        raise NotImplementedError

    def add_listener(self, listener: RequestListener) -> None:
        """Tell someone of every request from now on."""
        raise NotImplementedError

    async def watch_cache(self) -> AsyncIterator[bytes]:
        """Frames of the cache view, made only while somebody watches."""
        raise NotImplementedError
        yield

    @property
    def is_running(self) -> bool:
        """The engine process is there."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """End the engine process; requests that still run raise EngineDeadError."""
        raise NotImplementedError
