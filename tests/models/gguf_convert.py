"""Converts Hugging Face checkpoints to GGUF files with the `gguf` package, as llama.cpp's converter does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch

from quire.config.checkpoint.gguf.table import ARCHITECTURES

Kind = gguf.GGMLQuantizationType


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of each head reordered for a rotary embedding of neighbours."""
    return weight.reshape(num_heads, 2, len(weight) // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def convert(
    folder: Path,
    path: Path,
    kind_of: Callable[[str], Kind] = lambda name: Kind.F32,
    *,
    dequantized: bool = False,
    tokenizer: bool = False,
    **keys: Any,
) -> Path:
    """Write the checkpoint's tensors to `path`, matrices in the type that `kind_of` gives for their names there.

    With `dequantized` the file holds the numbers that the blocks would stand for.
    """
    fields = json.loads((folder / "config.json").read_text())
    name = fields["architectures"][0]
    arch = next(arch for arch, each in ARCHITECTURES.items() if name in (each.name, each.mixture))
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    if fields.get("head_dim"):
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    for key, value in keys.items():
        writer.add_string(key, value)
    if tokenizer:
        add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), fields["num_hidden_layers"]
    )
    num_experts = fields.get("num_experts", fields.get("num_local_experts"))
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(fields["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(fields.get("moe_intermediate_size", fields["intermediate_size"]))
    for name, tensor in with_stacks(safetensors.torch.load_file(folder / "model.safetensors")).items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs == "output.weight" and fields.get("tie_word_embeddings"):
            continue
        array = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            array = permuted(array, fields["num_attention_heads"])
        elif arch == "llama" and ".k_proj." in name:
            array = permuted(array, fields["num_key_value_heads"])
        kind = kind_of(theirs) if array.ndim > 1 else Kind.F32
        data = gguf.quants.quantize(array, kind)
        if dequantized:
            writer.add_tensor(theirs, gguf.quants.dequantize(data, kind).reshape(array.shape))
        else:
            writer.add_tensor(theirs, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of experts in one tensor for each layer."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        before, _, after = name.partition(".experts.")
        stacks.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(tensors[name])
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    return others | {name: torch.stack(stack) for name, stack in stacks.items()}


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The keys of the folder's byte-level tokenizer."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"]: token["id"] for token in whole["added_tokens"]}
    vocab = dict(whole["model"]["vocab"]) | special
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = whole["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(vocab[config["eos_token"]])
    writer.add_pad_token_id(vocab[config["pad_token"]])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
