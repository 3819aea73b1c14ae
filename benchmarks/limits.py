"""The least time that generation can take on a machine whose speeds were measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.checkpoint import HIDDEN, VOCAB

BUDGET = 2048
"""tokens of prompts in one step"""


@dataclass(frozen=True)
class Machine:
    """Speeds of all threads together; the second of bfloat16 multiply-adds in registers, which count two."""

    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Of a step that does both at once."""
        return max(num_bytes / self.read_bytes_per_s, flops / self.flops_per_s)


def generation_s(machine: Machine, weight_bytes: float, num_params: int, case: Mapping[str, int]) -> float:
    """The sum over steps of the longer of reading all weights and multiplying by them.

    Prompts run BUDGET tokens a step and only their last tokens need the head; then each step draws a token of each.
    Attention, and all else that is small beside the weights, is left out, so no engine can reach this.
    """
    num_prompts, head = case["num_prompts"], VOCAB * HIDDEN
    body = num_params - head
    prompt_tokens = num_prompts * case["input_len"]
    num_steps = math.ceil(prompt_tokens / BUDGET)
    prompt_flops = 2 * (prompt_tokens * body + num_prompts * head)
    prefill_s = num_steps * machine.seconds(weight_bytes, prompt_flops / num_steps)
    return prefill_s + (case["output_len"] - 1) * machine.seconds(weight_bytes, 2 * num_prompts * num_params)
