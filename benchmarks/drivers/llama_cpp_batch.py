"""llama.cpp through llama-cpp-python's bindings: `llama_cpp_batch MODEL.gguf NUM_THREADS`.

The package's own `Llama` runs one prompt at a time, so this driver builds the batches: the prompts in steps of n_batch
tokens, then steps of one token (the likeliest) for each sequence.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.drivers.protocol import Handler, random_prompts, serve, timed

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

    def decode(tokens: Iterable[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token id, position, sequence, draws) tuples; return the likeliest next token of each that draws."""
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
        return {
            seq_id: int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab_size,)).argmax())
            for seq_id, i in drawn.items()
        }

    def run(prompts: list[list[int]], output_len: int) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        inputs = [
            (token_id, position, seq_id, position == len(prompt) - 1)
            for seq_id, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(inputs), _BATCH_TOKENS):
            last |= decode(inputs[start : start + _BATCH_TOKENS])
        for step in range(output_len - 1):
            last = decode((token_id, len(prompts[seq_id]) + step, seq_id, True) for seq_id, token_id in last.items())

    def generate(num_prompts: int, input_len: int, output_len: int) -> dict[str, Any]:
        prompts = random_prompts(num_prompts, input_len)
        return {"elapsed_s": timed(lambda: run(prompts, output_len))}

    return {"generate": generate}


if __name__ == "__main__":
    serve(load)
