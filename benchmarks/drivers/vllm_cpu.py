"""vLLM's CPU build: `vllm_cpu CHECKPOINT MAX_MODEL_LEN [ADAPTER_FOLDER ...]`."""

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.drivers.protocol import TEMPERATURE, TOP_P, Handler, random_prompts, serve, timed


def load() -> Mapping[str, Handler]:
    """Load the engine."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    folders = sys.argv[3:]
    lora = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": 16} if folders else {}
    llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=int(sys.argv[2]), enable_prefix_caching=False, **lora)

    def generate(
        num_prompts: int, input_len: int, output_len: int, adapters: int = 0, sampled: bool = False
    ) -> dict[str, Any]:
        how = {"temperature": TEMPERATURE, "top_p": TOP_P} if sampled else {"temperature": 0}
        params = SamplingParams(**how, max_tokens=output_len, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(num_prompts, input_len)]
        requests = [LoRARequest(folder, i, folder) for i, folder in enumerate(folders, start=1)]
        wanted = [requests[i % adapters] for i in range(num_prompts)] if adapters else None
        return {"elapsed_s": timed(lambda: llm.generate(prompts, params, use_tqdm=False, lora_request=wanted))}

    return {"generate": generate}


if __name__ == "__main__":
    serve(load)
