"""An engine with or without drafts: `drafted quire|vllm|llama METHOD MODEL DRAFT NUM_DRAFTS NUM_THREADS`.

METHOD is `off`, `ngram` or `draft_model`. Requests are greedy and run one at a time. llama-cpp-python looks tokens up
by itself; for a draft model it takes a function, which here asks a second model for its likeliest tokens.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.drivers.protocol import Handler, serve, timed

Generate = Callable[[list[int], int], list[int]]
_MAX_MODEL_LEN = 1024


def quire(method: str, model: str, draft: str, num_drafts: int, num_threads: int) -> Generate:
    """This checkout; the number of drafts is its own choice."""
    from quire import LLM, SamplingParams

    config = {"method": method} | ({"model": draft} if method == "draft_model" else {})
    settings: dict[str, Any] = {"max_model_len": _MAX_MODEL_LEN, "kv_cache_memory": "256MiB"}
    llm = LLM(model, dtype="bfloat16", enable_prefix_caching=False, speculative_config=config, **settings)

    def generate(prompt: list[int], output_len: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

    return generate


def vllm(method: str, model: str, draft: str, num_drafts: int, num_threads: int) -> Generate:
    """vLLM's CPU build."""
    from vllm import LLM, SamplingParams

    config: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
    config |= {"model": draft} if method == "draft_model" else {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    speculative = {} if method == "off" else {"speculative_config": config}
    settings: dict[str, Any] = {"max_model_len": _MAX_MODEL_LEN, "enable_prefix_caching": False, "max_num_seqs": 8}
    settings["enforce_eager"] = True  # compiling takes minutes for each method, and these steps read weights
    llm = LLM(model=model, dtype="bfloat16", **settings, **speculative)

    def generate(prompt: list[int], output_len: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

    return generate


def llama(method: str, model: str, draft: str, num_drafts: int, num_threads: int) -> Generate:
    """llama.cpp through llama-cpp-python."""
    import numpy as np
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    settings: dict[str, Any] = {"n_ctx": _MAX_MODEL_LEN, "n_threads": num_threads, "n_threads_batch": num_threads}
    settings["verbose"] = False

    class Drafts(LlamaDraftModel):  # type: ignore[misc]
        def __init__(self) -> None:
            self._model = Llama(draft, **settings)

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            found = list[int]()
            for token_id in self._model.generate(input_ids.tolist(), temp=0.0):  # keeps what it has read before
                found.append(token_id)
                if len(found) == num_drafts:
                    break
            return np.array(found, dtype=np.intc)

    drafter = {
        "off": lambda: None,
        "ngram": lambda: LlamaPromptLookupDecoding(max_ngram_size=4, num_pred_tokens=num_drafts),
        "draft_model": Drafts,
    }[method]()
    loaded = Llama(model, draft_model=drafter, **settings)

    def generate(prompt: list[int], output_len: int) -> list[int]:
        loaded.reset()
        found = list[int]()
        for token_id in loaded.generate(prompt, temp=0.0, repeat_penalty=1.0):
            found.append(token_id)
            if len(found) == output_len:
                break
        return found

    return generate


_ENGINES = {"quire": quire, "vllm": vllm, "llama": llama}


def load() -> Mapping[str, Handler]:
    """Load the engine."""
    name, method, model, draft, num_drafts, num_threads = sys.argv[1:]
    one = _ENGINES[name](method, model, draft, int(num_drafts), int(num_threads))

    def generate(prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        outputs = list[list[int]]()
        elapsed_s = timed(lambda: outputs.extend(one(prompt, output_len) for prompt in prompts))
        return {"elapsed_s": elapsed_s, "outputs": outputs}

    return {"generate": generate}


if __name__ == "__main__":
    serve(load)
