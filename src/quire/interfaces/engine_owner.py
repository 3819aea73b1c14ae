"""What an LLM has besides the calls that run requests: its engine or engines, the tokenizer, metrics, sleep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from quire.common.errors import ConfigError
from quire.common.params import SamplingParams
from quire.config.args import EngineArgs
from quire.engine.llm_engine import LLMEngine
from quire.engine.metrics import Metric
from quire.interfaces.engine_processes import EngineProcesses
from quire.interfaces.logits_processors import EngineProcessors, LogitsProcessor
from quire.interfaces.running import request_ids
from quire.text.tokenizer.callable_tokenizer import CallableTokenizer
from quire.text.tokenizer.tokenizer import Tokenizer


def _make_engine(args: EngineArgs) -> LLMEngine | EngineProcesses:
    return EngineProcesses(args) if args.has_own_processes else LLMEngine.from_args(args)


class EngineOwner:
    """Owns one engine in this process or, with `data_parallel_size`, several in processes of their own."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        logits_processors: Sequence[type[LogitsProcessor]] | type[LogitsProcessor] | None = None,
        **kwargs: Any,
    ) -> None:
        args = EngineArgs(model=model if model is None else str(model), **kwargs)
        if args.has_own_processes and logits_processors:
            raise ConfigError(
                "logits_processors cannot be sent to engines in other processes: use data_parallel_size=1, and no Ray"
            )
        self._engine = _make_engine(args)
        self._processors = EngineProcessors(logits_processors or (), self._engine.config)
        self._request_ids = request_ids()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Make an LLM, and the engine that these arguments describe."""
        return cls.from_engine(_make_engine(args))

    @property
    def engine(self) -> LLMEngine:
        """The engine. Raises ConfigError if there are several, which are in other processes."""
        if isinstance(self._engine, EngineProcesses):
            raise ConfigError("several engines, in processes of their own, cannot be used directly")
        return self._engine

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name."""
        return self.engine

    @classmethod
    def from_engine(cls, engine: LLMEngine | EngineProcesses) -> Self:
        """Make an LLM over an existing engine."""
        llm = cls.__new__(cls)
        llm._engine = engine
        llm._processors = EngineProcessors((), engine.config)
        llm._request_ids = request_ids()
        return llm

    def get_tokenizer(self) -> CallableTokenizer:
        """Return the tokenizer, with the methods and defaults of transformers' tokenizers."""
        return self._engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Tokenizer | CallableTokenizer | str | Path) -> None:
        """Use another tokenizer from now on: an object, of transformers or of Quire, or the folder of one.

        Raises TokenizerError if it cannot be used with the model, and RequestError while requests run.
        """
        self._engine.set_tokenizer(Tokenizer.of(tokenizer))

    def default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's recommended parameters, with SamplingParams' defaults for the rest."""
        return self._engine.default_sampling_params()

    get_default_sampling_params = default_sampling_params
    """vLLM's name."""

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics of docs/metrics.md, as objects of quire.v1.metrics.reader."""
        return self._engine.get_metrics()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, except pinned ones. Returns False, and does nothing, while requests run, unless
        they are to be reset: then they compute their tokens again, those in the host tier too."""
        return self._engine.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and KV cache until `wake_up`. All `level`s are the same: the weights are in
        their files. Raises RequestError while requests run."""
        self._engine.sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model again. It is ready for `generate`, whatever `tags` are given."""
        self._engine.wake_up()
