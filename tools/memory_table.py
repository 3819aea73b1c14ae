"""Write the tables of docs/how-to/memory.md: the memory that well-known models need.

    python -m tools.memory_table [--check]

The figures are those of `quire plan`, for checkpoints that have the shapes of these models and no weights. With --check
nothing is written, and the exit status is 1 if the page differs.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from quire.config.args import EngineArgs
from quire.config.machine import MachineMemory
from quire.runner.memory_plan import MemoryPlan, plan_memory
from tools.written_tables import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "memory.md"
CONTEXTS = (4_096, 32_768)
FORMATS = (("bf16", None), ("int8", "int8"), ("int4", "int4"))
GIB = 2**30
_UNLIMITED = MachineMemory(limit_bytes=2**50, available_bytes=2**50)


@dataclass(frozen=True)
class Shape:
    """What a model's config.json says about its size."""

    name: str
    family: str
    """`Llama`, `Mistral`, `Qwen2` or `Qwen3`"""
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    max_context: int

    def config(self) -> dict[str, object]:
        """A config.json with these sizes."""
        return {
            "architectures": [f"{self.family}ForCausalLM"],
            "model_type": self.family.lower(),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": self.max_context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "sliding_window": None,
            "dtype": "bfloat16",
            "eos_token_id": 2,
        }


SHAPES = (
    Shape("SmolLM2 135M", "Llama", 576, 1536, 30, 9, 3, 64, 49152, True, 8192),
    Shape("SmolLM2 1.7B", "Llama", 2048, 8192, 24, 32, 32, 64, 49152, True, 8192),
    Shape("Qwen2.5 0.5B", "Qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768),
    Shape("Qwen2.5 1.5B", "Qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 32768),
    Shape("Qwen2.5 3B", "Qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True, 32768),
    Shape("Qwen2.5 7B", "Qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 32768),
    Shape("Qwen3 0.6B", "Qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    Shape("Qwen3 4B", "Qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    Shape("Qwen3 8B", "Qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 40960),
    Shape("Llama 3.2 1B", "Llama", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072),
    Shape("Llama 3.2 3B", "Llama", 3072, 8192, 28, 24, 8, 128, 128256, True, 131072),
    Shape("Llama 3.1 8B", "Llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072),
    Shape("Mistral 7B v0.3", "Mistral", 4096, 14336, 32, 32, 8, 128, 32768, False, 32768),
)


@cache
def plan(shape: Shape, context: int, quantization: str | None, kv_cache_dtype: str) -> MemoryPlan:
    """The plan for one request of `context` tokens at a time, on a machine with enough memory."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
        save_file({"unused": torch.zeros(1)}, Path(folder) / "model.safetensors")
        args = EngineArgs(
            model=folder,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=context,
            num_gpu_blocks_override=context // 16,
        )
        with patch("quire.runner.memory_plan.machine_memory", return_value=_UNLIMITED):
            return plan_memory(args)


def tables() -> Iterator[str]:
    """The lines of both tables."""
    names = [name for name, _ in FORMATS]
    yield from ("", "### All of it, for one request", "")
    yield f"| GiB | {' | '.join(f'{name}, {context:,}' for context in CONTEXTS for name in names)} |"
    yield "|---" * (1 + len(CONTEXTS) * len(names)) + "|"
    for shape in SHAPES:
        cells = [_total(shape, context, quantization) for context in CONTEXTS for _, quantization in FORMATS]
        yield f"| {shape.name} | {' | '.join(cells)} |"
    yield from ("", "### Its parts", "")
    parts = [*(f"weights {name}" for name in names), "calculation", "cache of 1,000 tokens", "the same in int8"]
    yield f"| GiB, MiB for the cache | {' | '.join(parts)} |"
    yield "|---" * (4 + len(names)) + "|"
    for shape in SHAPES:
        weights = [_gib(plan(shape, CONTEXTS[0], quantization, "auto").weight_bytes) for _, quantization in FORMATS]
        activations = _gib(plan(shape, CONTEXTS[0], None, "auto").activation_bytes)
        caches = [_cache_of_1000(plan(shape, CONTEXTS[0], None, dtype)) for dtype in ("auto", "int8")]
        yield f"| {shape.name} | {' | '.join([*weights, activations, *caches])} |"
    yield ""


def _total(shape: Shape, context: int, quantization: str | None) -> str:
    if context > shape.max_context:
        return ""
    found = plan(shape, context, quantization, "auto")
    return _gib(found.weight_bytes + found.activation_bytes + found.kv_cache.total_bytes)


def _cache_of_1000(found: MemoryPlan) -> str:
    return f"{found.kv_cache.total_bytes / found.kv_cache.max_tokens * 1000 / 2**20:.0f} MiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB else f"{num_bytes / GIB:.2f}"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, "tools/memory_table.py", tables()))
