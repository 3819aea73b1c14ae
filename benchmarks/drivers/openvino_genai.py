"""OpenVINO GenAI's continuous batching pipeline on the CPU: `openvino_genai EXPORTED_MODEL`."""

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.drivers.protocol import TEMPERATURE, TOP_P, Handler, random_prompts, serve, timed

_CACHE_GIB = 2


def load() -> Mapping[str, Handler]:
    """Compile the model."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIB
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", properties)

    def generate(num_prompts: int, input_len: int, output_len: int, sampled: bool = False) -> dict[str, Any]:
        prompts = [ov.Tensor(np.array([ids], np.int64)) for ids in random_prompts(num_prompts, input_len)]
        how = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P} if sampled else {"do_sample": False}
        config = genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, **how)
        return {"elapsed_s": timed(lambda: pipeline.generate(prompts, [config] * num_prompts))}

    return {"generate": generate}


if __name__ == "__main__":
    serve(load)
