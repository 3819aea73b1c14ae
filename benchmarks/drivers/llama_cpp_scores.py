"""What llama.cpp makes of a text: `llama_cpp_scores MODEL.gguf FORMAT TOKENS.json PIECE NUM_THREADS OUT.npy`.

The model is quantized to FORMAT first (`Q8_0`, `Q4_K_M`, ...; `as-stored` for none). OUT gets the log-probabilities
[tokens, vocab] float32 of the next token after each but the last; tokens see each other within pieces. Run in
llama.cpp's environment.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def requantized(lib: Any, source: Path, weight_format: str, folder: Path) -> Path:
    """The model in another format, made by llama.cpp."""
    out = folder / f"{weight_format}.gguf"
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{weight_format}"), True
    if lib.llama_model_quantize(str(source).encode(), str(out).encode(), params) != 0:
        raise RuntimeError(f"llama.cpp cannot make {weight_format} of {source}")
    return out


def write_scores(lib: Any, path: Path, token_ids: list[int], piece: int, num_threads: int, out: Path) -> None:
    """Run the pieces one after the other."""
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = piece, piece, min(piece, 512)
    params.n_threads = params.n_threads_batch = num_threads
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(piece, 0, 1)
    num_rows = len(token_ids) - 1
    scores = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=(num_rows, vocab_size))
    for start in range(0, num_rows, piece):
        tokens = token_ids[start : min(start + piece, num_rows)]
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        for i, token_id in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(tokens)
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for i in range(len(tokens)):
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab_size,)).astype(np.float64)
            logits -= logits.max()
            scores[start + i] = logits - np.log(np.exp(logits).sum())
    scores.flush()


def main() -> None:
    """Score the text named on the command line."""
    import llama_cpp as lib

    model, weight_format, tokens, piece, num_threads, out = sys.argv[1:]
    token_ids = json.loads(Path(tokens).read_text())
    with tempfile.TemporaryDirectory(dir=Path(out).parent) as folder:
        path = Path(model)
        if weight_format != "as-stored":
            path = requantized(lib, path, weight_format, Path(folder))
        write_scores(lib, path, token_ids, int(piece), int(num_threads), Path(out))


if __name__ == "__main__":
    main()
