"""llama.cpp through llama-cpp-python's bindings: `llama_cpp_batch MODEL.gguf NUM_THREADS`.

The package's own `Llama` runs one prompt at a time, so this driver builds the batches: the prompts in steps of n_batch
tokens, then steps of one token for each sequence.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.drivers.protocol import TEMPERATURE, TOP_P, Handler, random_prompts, serve, timed

_BATCH_TOKENS = 2048
_MAX_SEQS = 32
_CACHE_TOKENS = 16384


def load() -> Mapping[str, Handler]:
    """Load the model."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {sys.argv[1]}")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _CACHE_TOKENS, _BATCH_TOKENS, 512, _MAX_SEQS
    params.n_threads = params.n_threads_batch = int(sys.argv[2])
    params.kv_unified = True
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(_BATCH_TOKENS, 0, 1)

    sampler = _sampler(lib)

    def likeliest(i: int) -> int:
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab_size,)).argmax())

    def drawn_token(i: int) -> int:
        return int(lib.llama_sampler_sample(sampler, context, i))

    def decode(tokens: Iterable[tuple[int, int, int, bool]], choose: Callable[[int], int]) -> dict[int, int]:
        """Run (token id, position, sequence, draws) tuples; return the next token of each that draws."""
        drawn = {}
        batch.n_tokens = 0
        for i, (token_id, position, seq_id, draws) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, draws
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            batch.n_tokens = i + 1
            if draws:
                drawn[seq_id] = i
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return {seq_id: choose(i) for seq_id, i in drawn.items()}

    def run(prompts: list[list[int]], output_len: int, choose: Callable[[int], int]) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        inputs = [
            (token_id, position, seq_id, position == len(prompt) - 1)
            for seq_id, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(inputs), _BATCH_TOKENS):
            last |= decode(inputs[start : start + _BATCH_TOKENS], choose)
        for step in range(output_len - 1):
            tokens = ((token_id, len(prompts[seq_id]) + step, seq_id, True) for seq_id, token_id in last.items())
            last = decode(tokens, choose)

    def generate(num_prompts: int, input_len: int, output_len: int, sampled: bool = False) -> dict[str, Any]:
        prompts = random_prompts(num_prompts, input_len)
        return {"elapsed_s": timed(lambda: run(prompts, output_len, drawn_token if sampled else likeliest))}

    return {"generate": generate}


def _sampler(lib: Any) -> Any:
    """Make what draws a token as other engines are asked to."""
    sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_top_p(TOP_P, 1))
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_temp(TEMPERATURE))
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(0))
    return sampler


if __name__ == "__main__":
    serve(load)
