"""The token ids that llama.cpp gives to texts: `llama_cpp_tokens MODEL.gguf TEXTS.json OUT.json`.

Special tokens in a text are recognized; none are added. Run in llama.cpp's environment.
"""

import ctypes
import json
import sys
from pathlib import Path


def main() -> None:
    """Tokenize the texts named on the command line."""
    import llama_cpp as lib

    path, texts, out = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), Path(sys.argv[3])
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    vocab = lib.llama_model_get_vocab(model)
    found = []
    for text in texts:
        data = text.encode("utf-8")
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = lib.llama_tokenize(vocab, data, len(data), ids, room, False, True)
        if count < 0:
            raise RuntimeError(f"llama.cpp needs {-count} tokens for {len(data)} bytes")
        found.append(list(ids[:count]))
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
