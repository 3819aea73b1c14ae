"""Write a Qwen2 or Llama checkpoint as GGUF: `convert_to_gguf CHECKPOINT BF16|Q8_0|Q4_K_M OUT`.

Run in llama.cpp's environment.

Q4_K_M is a mixture that llama.cpp itself makes of a BF16 file. It groups 256 weights of a row; for rows that are not a
multiple of that it takes Q5_0 or Q8_0 instead. A Llama checkpoint, whose layers have no biases, is written as a Qwen2
whose biases are 0.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return GGUF's name for a tensor of the checkpoint."""
    name = name.removeprefix("model.")
    if not name.startswith("layers."):
        return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def add_settings(writer: Any, config: dict[str, Any]) -> None:
    """Add the shape of the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)


def add_vocabulary(writer: Any, tokenizer: str, vocab_size: int, eos_token_id: int = 0) -> None:
    """Add the vocabulary of a `tokenizer.json`, given as text, padded to the model's size with unused tokens."""
    import gguf

    model = json.loads(tokenizer)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    unused = [f"[unused{index}]" for index in range(vocab_size - len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + unused)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * len(unused))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eos_token_id)


def bfloat16_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the bfloat16 tensors of a safetensors file as float32 arrays, because NumPy has no bfloat16."""
    import numpy as np

    content = np.memmap(path, np.uint8, "r")
    start = 8 + int(content[:8].view(np.uint64)[0])
    header = json.loads(content[8:start].tobytes())
    for name, info in header.items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            halves = content[start + first : start + last].view(np.uint16).astype(np.uint32)
            yield name, (halves << 16).view(np.float32).reshape(info["shape"])


def write(folder: Path, weight_format: str, out: Path) -> None:
    """Write a file with all matrices in one format."""
    import gguf
    import numpy as np

    matrix_kind = gguf.GGMLQuantizationType[weight_format]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen2")
    add_settings(writer, config)
    add_vocabulary(writer, (folder / "tokenizer.json").read_text(), config["vocab_size"], config["eos_token_id"])
    for name, values in bfloat16_tensors(folder / "model.safetensors"):
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            biases = np.zeros(len(values), np.float32)
            writer.add_tensor(gguf_name(name).replace("weight", "bias"), biases)
        kind = matrix_kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_mixture(folder: Path, name: str, out: Path) -> None:
    """Write a file with a mixture of formats, as llama.cpp's own tool makes it."""
    import llama_cpp as lib

    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        source = Path(temporary) / "bf16.gguf"
        write(folder, "BF16", source)
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name}")
        if lib.llama_model_quantize(str(source).encode(), str(out).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp cannot make {name} of {folder}")


def main() -> None:
    """Convert the checkpoint given on the command line."""
    folder, weight_format, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    (write_mixture if weight_format.endswith("_M") else write)(folder, weight_format, out)


if __name__ == "__main__":
    main()
