"""Hugging Face transformers, one static batch: `transformers_static CHECKPOINT`."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.drivers.protocol import TEMPERATURE, TOP_P, Handler, random_prompts, serve, timed


def load() -> Mapping[str, Handler]:
    """Load the model."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None

    def generate(num_prompts: int, input_len: int, output_len: int, sampled: bool = False) -> dict[str, Any]:
        ids = torch.tensor(random_prompts(num_prompts, input_len))
        mask = torch.ones_like(ids)
        how: dict[str, Any] = {"do_sample": False}
        if sampled:
            how = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0}
        run = partial(model.generate, ids, attention_mask=mask, max_new_tokens=output_len, **how)
        return {"elapsed_s": timed(run)}

    return {"generate": generate}


if __name__ == "__main__":
    serve(load)
