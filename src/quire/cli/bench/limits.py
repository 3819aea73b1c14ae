"""What this machine can do at best, measured beside what is compared with it."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire import kernels
from quire.common.errors import ConfigError
from quire.kernels.backends.native_backend import DTYPE_CODES, NativeBackend
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import LmHead
from quire.models.registry import model_class
from quire.runner.memory_plan import MemoryPlan

COLD_BYTES = 256 * 2**20
"""more than caches hold"""
_PEAK_ROUNDS, _MIN_CALLS = 50_000, 3


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Limits:
    """Two speeds, of all threads that the kernels run on together."""

    read_bytes_per_s: float
    flops_per_s: float
    """of multiply-adds in registers, which count two: of bytes for quantized weights, bfloat16 ones where the CPU has
    them"""

    @classmethod
    def measure(cls, dtype: str, repeats: int = 5) -> "Limits":
        """The best of a few tries; `dtype` may be a format of quantized weights. ConfigError without native kernels."""
        backend = kernels.backend_for("cpu")
        if not isinstance(backend, NativeBackend):
            raise ConfigError("the machine's limits are measured by the native kernels: install Quire with them")
        native, quantized = backend.native, dtype in kernels.QUANTIZED_FORMATS
        code = len(DTYPE_CODES) if quantized else DTYPE_CODES[getattr(torch, dtype)]
        memory = _cold_memory()
        flops = native.multiply_in_registers(code, 1) * kernels.num_threads() * _PEAK_ROUNDS
        read_s = min(seconds(lambda: native.read_memory(memory.ctypes.data, memory.nbytes)) for _ in range(repeats))
        peak_s = min(seconds(lambda: native.multiply_in_registers(code, _PEAK_ROUNDS)) for _ in range(repeats))
        return cls(memory.nbytes / read_s, flops / peak_s)

    def least_s(self, num_bytes: float, flops: float) -> float:
        """Of work that reads and multiplies at once."""
        return max(num_bytes / self.read_bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class WeightCosts:
    """What a step reads and multiplies by."""

    num_bytes: int
    """of all weights, as they are kept; a table of which a step reads some rows does not count"""
    body: int
    """elements of the matrices that every token passes"""
    head: int
    """and of the one that only tokens pass after which another is drawn"""

    @classmethod
    def of(cls, plan: MemoryPlan) -> "WeightCosts":
        """Worked out from the checkpoint's configuration."""
        config = plan.config.model
        num_bytes, body, head = plan.weight_bytes, 0, 0
        model = model_class(config.architecture)(dataclasses.replace(config, max_model_len=1))  # no long rotary table
        for _, layer in model.weighted_layers():
            for spec in layer.weight_specs().values():
                if spec.kept:
                    num_bytes -= spec.num_bytes
                elif len(spec.shape) == 2 and isinstance(layer, LmHead | Embedding):
                    head += math.prod(spec.shape)
                elif len(spec.shape) == 2:
                    body += math.prod(spec.shape)
        return cls(num_bytes, body, head)

    def generation_s(
        self, limits: Limits, *, num_prompts: int, input_len: int, output_len: int, max_num_batched_tokens: int
    ) -> float:
        """The least time of `num_prompts` prompts that start together: the sum of its steps' least times.

        Prompts first, so many tokens in a step as fit, each giving a first token; then steps of one token for every
        prompt. Each step reads all weights once and does two operations per element and token, whichever takes longer.
        Attention, the cache and activations are left out, so this is never reached.
        """
        prompt_tokens = num_prompts * input_len
        num_steps = math.ceil(prompt_tokens / max_num_batched_tokens)
        prompt_flops = 2.0 * (prompt_tokens * self.body + num_prompts * self.head)
        prompts_s = num_steps * limits.least_s(self.num_bytes, prompt_flops / num_steps)
        decode_s = limits.least_s(self.num_bytes, 2.0 * num_prompts * (self.body + self.head))
        return prompts_s + (output_len - 1) * decode_s


@cache
def _cold_memory() -> npt.NDArray[np.float32]:
    """NumPy asks for huge pages, as the kernels' weights have them; reading small ones is a third slower."""
    return np.ones(COLD_BYTES // 4, np.float32)


def compare(
    calls: Sequence[Callable[[], object]], num_bytes: float, flops: float, dtype: str, budget_s: float
) -> dict[str, Any]:
    """Time calls in turn for `budget_s`, a few at least, and the limits between them: on a shared machine both move.

    The best counts, on both sides. Each call moves `num_bytes` and does `flops` operations.
    """
    start, times, limits = time.perf_counter(), list[float](), list[Limits]()
    for call in cycle(calls):
        elapsed_s = time.perf_counter() - start
        if len(times) >= _MIN_CALLS and elapsed_s > budget_s:
            break
        if elapsed_s >= len(limits) * budget_s / 16:
            limits.append(Limits.measure(dtype, 1))
        times.append(seconds(call))
    best_s = min(times)
    reading = num_bytes / max(limit.read_bytes_per_s for limit in limits)
    multiplying = flops / max(limit.flops_per_s for limit in limits)
    return {
        "isa": kernels.isa(),
        "threads": kernels.num_threads(),
        "dtype": dtype,
        "us": round(best_s * 1e6, 1),
        "gb_per_s": round(num_bytes / best_s / 1e9, 1),
        "gflop_per_s": round(flops / best_s / 1e9, 1),
        "limit": "reading" if reading > multiplying else "multiplying",
        "of_limit": round(max(reading, multiplying) / best_s, 3),
    }
