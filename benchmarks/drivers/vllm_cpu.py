"""vLLM's CPU build: `vllm_cpu CHECKPOINT`."""

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.drivers.protocol import Handler, random_prompts, serve, timed


def load() -> Mapping[str, Handler]:
    """Load the engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=int(sys.argv[2]), enable_prefix_caching=False)

    def generate(num_prompts: int, input_len: int, output_len: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(num_prompts, input_len)]
        return {"elapsed_s": timed(lambda: llm.generate(prompts, params, use_tqdm=False))}

    return {"generate": generate}


if __name__ == "__main__":
    serve(load)
