"""The limits of this machine, measured at the same time as the work that is compared with them."""

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

from quire import kernels
from quire.common.errors import ConfigError
from quire.config.machine import largest_cache_bytes, machine_memory
from quire.config.model import ModelConfig
from quire.kernels.backends.native.arguments import DTYPE_CODES
from quire.kernels.backends.native.backend import NativeBackend
from quire.models.layers.embedding import Embedding
from quire.models.layers.experts import Experts
from quire.models.layers.linear import LmHead
from quire.models.layers.weighted_layer import WeightedLayer
from quire.models.registry import class_of
from quire.models.weights.loader import build_model, open_weights
from quire.runner.memory_plan import MemoryPlan

COLD_BYTES = max(256 * 2**20, min(largest_cache_bytes() * 5 // 4, machine_memory().available_bytes // 4))
"""More bytes than the caches of all CPUs hold, or a quarter of the available memory if that is less."""
_PEAK_ROUNDS, _MIN_CALLS, _MEASUREMENTS = 50_000, 3, 8


def seconds(call: Callable[[], object]) -> float:
    """Return how many seconds one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Limits:
    """Two speeds of this machine, with all threads of the kernels at work together."""

    read_bytes_per_s: float
    flops_per_s: float
    """Operations per second of multiply-adds in registers, each counted as two: of 8-bit integers for quantized
    weights, and of bfloat16 where the CPU has such instructions."""

    @classmethod
    def measure(cls, dtype: str, repeats: int = 5) -> "Limits":
        """The best of a few tries; `dtype` may be a format of quantized weights. ConfigError without native kernels."""
        backend = kernels.backend_for("cpu")
        if not isinstance(backend, NativeBackend):
            raise ConfigError(
                "the machine's limits are measured by the native kernels: unset QUIRE_ISA, or install Quire with them"
            )
        native, codes = backend.native, [str(each).removeprefix("torch.") for each in DTYPE_CODES]
        code = [*codes, *kernels.QUANTIZED_FORMATS].index(dtype)
        memory = _cold_memory()
        flops = native.multiply_in_registers(code, 1) * kernels.num_threads() * _PEAK_ROUNDS
        read_s = min(seconds(lambda: native.read_memory(memory.ctypes.data, memory.nbytes)) for _ in range(repeats))
        peak_s = min(seconds(lambda: native.multiply_in_registers(code, _PEAK_ROUNDS)) for _ in range(repeats))
        return cls(memory.nbytes / read_s, flops / peak_s)

    def least_s(self, num_bytes: float, flops: float) -> float:
        """Return the least time of work that reads and multiplies at the same time."""
        return max(num_bytes / self.read_bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class WeightCosts:
    """The weights that a step reads and multiplies by."""

    num_bytes: int
    """Bytes of all weights as they are stored, without tables of which a step reads only some rows. Of experts, the
    share of those that a token goes to: a step of one token reads no others."""
    body: int
    """Elements of the matrices that multiply every token."""
    head: int
    """Elements of the output head, which multiplies only the tokens after which another token is sampled."""

    @classmethod
    def of(cls, plan: MemoryPlan) -> "WeightCosts":
        """Compute the costs from the checkpoint's configuration and headers."""
        config = plan.config.model
        num_bytes, body, head = plan.weight_bytes, 0, 0
        made = class_of(config)
        model = made(dataclasses.replace(config, max_model_len=1))  # no long rotary table
        mixtures = [module for module in model.modules() if isinstance(module, Experts)]
        idle = {expert: 1 - each.routing.top_k / each.routing.num_experts for each in mixtures
                for expert in each.experts.modules()}  # fmt: skip
        num_idle = 0.0
        for _, layer in model.weighted_layers():
            for spec in layer.weight_specs().values():
                if spec.kept:
                    num_bytes -= spec.num_bytes
                elif len(spec.shape) == 2 and isinstance(layer, LmHead | Embedding):
                    head += math.prod(spec.shape)
                elif len(spec.shape) == 2:
                    body += math.prod(spec.shape)
                    num_idle += math.prod(spec.shape) * idle.get(layer, 0.0)
        return cls(int(num_bytes - _idle_bytes(config)), int(body - num_idle), head)

    def generation_s(
        self, limits: Limits, *, num_prompts: int, input_len: int, output_len: int, max_num_batched_tokens: int
    ) -> float:
        """Return the least time for `num_prompts` prompts that start together: the sum of the least times of all steps.

        The first steps compute the prompts, with the largest number of tokens that fits into a step; each later step
        computes one token for every prompt. A step reads all weights once and does two operations per element and
        token, and takes as long as the slower of the two. Attention, the KV cache and activations are not counted, so
        no run can reach this limit. That the last layer leaves out tokens whose hidden states are not read is not
        counted either: it would be less by up to one layer's share of the prompts.
        """
        prompt_tokens = num_prompts * input_len
        num_steps = math.ceil(prompt_tokens / max_num_batched_tokens)
        prompt_flops = 2.0 * (prompt_tokens * self.body + num_prompts * self.head)
        prompts_s = num_steps * limits.least_s(self.num_bytes, prompt_flops / num_steps)
        decode_s = limits.least_s(self.num_bytes, 2.0 * num_prompts * (self.body + self.head))
        return prompts_s + (output_len - 1) * decode_s


def _idle_bytes(config: ModelConfig) -> float:
    """What the matrices of experts take that a token does not go to, in the formats that they will have."""
    model = build_model(dataclasses.replace(config, max_model_len=1), open_weights(config))
    return sum(
        spec.num_bytes * (1 - mixture.routing.top_k / mixture.routing.num_experts)
        for mixture in model.modules()
        if isinstance(mixture, Experts)
        for layer in mixture.experts.modules()
        if isinstance(layer, WeightedLayer)
        for spec in layer.weight_specs().values()
    )


def significant(share: float) -> float:
    """The share with three significant digits: a tiny kernel on a busy machine is far below 0.001, and not 0."""
    return float(f"{share:.3g}")


@cache
def _cold_memory() -> npt.NDArray[np.float32]:
    """Return memory in huge pages (NumPy asks for them), like the kernels' weights: small pages read a third slower."""
    return np.ones(COLD_BYTES // 4, np.float32)


def compare(
    calls: Sequence[Callable[[], object]], num_bytes: float, flops: float, dtype: str, budget_s: float
) -> dict[str, Any]:
    """Time the calls one after the other until they have taken `budget_s` seconds, and measure the machine's limits
    between them.

    Both change while other programs use the machine, so they are measured interleaved, and the best of each counts.
    The first calls after a measurement are slower, as threads sleep and caches hold other things, so that its time must
    not count as that of calls. Each call moves `num_bytes` bytes and does `flops` operations; at least a few calls are
    timed.
    """
    times, spent_s, limits = list[float](), 0.0, list[Limits]()
    for call in cycle(calls):
        if len(times) >= _MIN_CALLS and spent_s > budget_s:
            break
        if spent_s >= len(limits) * budget_s / _MEASUREMENTS:
            limits.append(Limits.measure(dtype, 1))
        times.append(seconds(call))
        spent_s += times[-1]
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
        "of_limit": significant(max(reading, multiplying) / best_s),
    }
