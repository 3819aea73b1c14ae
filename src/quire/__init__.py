"""Quire: a small LLM inference and serving engine around a paged KV cache.

    from quire import LLM, SamplingParams

Names are imported when first used: `import quire` alone loads neither torch nor numpy.
"""

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.common.version import __version__

if TYPE_CHECKING:
    from quire.common.errors import (
        CheckpointError,
        ConfigError,
        EngineBrokenError,
        EngineDeadError,
        InvalidParamsError,
        InvalidPromptError,
        KernelError,
        OutOfMemoryError,
        PromptTooLongError,
        QuireError,
        RequestError,
        RequestFailedError,
        TokenizerError,
        UnsupportedModelError,
    )
    from quire.common.lora import LoRARequest
    from quire.common.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        EngineStats,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
    from quire.config.args import EngineArgs
    from quire.engine.arg_utils import AsyncEngineArgs
    from quire.engine.llm_engine import LLMEngine
    from quire.interfaces.async_llm.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.interfaces.llm import LLM
    from quire.interfaces.prompts import PromptType, TextPrompt, TokensPrompt
    from quire.kv.prefix_cache.pins import PinnedPrefix

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineBrokenError",
    "EngineDeadError",
    "EngineStats",
    "InvalidParamsError",
    "InvalidPromptError",
    "KernelError",
    "LLMEngine",
    "LoRARequest",
    "OutOfMemoryError",
    "PinnedPrefix",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptTooLongError",
    "PromptType",
    "QuireError",
    "RequestError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenizerError",
    "TokensPrompt",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), "quire.interfaces.async_llm.async_llm"),
    "LLM": "quire.interfaces.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "LoRARequest": "quire.common.lora",
    "AsyncEngineArgs": "quire.engine.arg_utils",
    "EngineArgs": "quire.config.args",
    **dict.fromkeys(
        ("BeamSearchParams", "PoolingParams", "SamplingParams", "StructuredOutputsParams"), "quire.common.params"
    ),
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), "quire.interfaces.prompts"),
    "PinnedPrefix": "quire.kv.prefix_cache.pins",
    **dict.fromkeys(
        (
            "BeamSearchOutput",
            "BeamSearchSequence",
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "CompletionOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "EngineStats",
            "PoolingOutput",
            "PoolingRequestOutput",
            "RequestMetrics",
            "RequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        "quire.common.outputs",
    ),
    **{name: "quire.common.errors" for name in __all__ if name.endswith("Error")},
}

# With these, torch's OpenMP library binds the thread that loads it to one CPU, and so all threads that this one starts.
# Quire says itself where its threads run.
for _name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
    if "torch" not in sys.modules:
        os.environ.pop(_name, None)
    elif _name in os.environ and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1:
        _text = (
            f"{_name} has bound this thread, and all that it starts, to one CPU: unset it, or import quire before torch"
        )
        warnings.warn(_text, RuntimeWarning, stacklevel=2)

# vLLM's modules that Quire has elsewhere: see quire/interfaces/compat/__init__.py
__path__.append(str(Path(__file__).parent / "interfaces" / "compat"))

if not TYPE_CHECKING:  # type checkers know the names above, and shall not take any other

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'quire' has no attribute {name!r}")
        from quire.common.memory import collection_paused

        with collection_paused():
            value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
