"""Converts Hugging Face checkpoints to GGUF files with the `gguf` package, as llama.cpp's converter does."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch

from quire.config.checkpoint.gguf.table import ARCHITECTURES
from quire.config.model import ModelConfig

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
    fuse_qkv: bool = False,
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
    **keys: Any,
) -> Path:
    """Write the checkpoint's tensors to `path`, matrices in the type that `kind_of` gives for their names there.

    With `dequantized` the file holds the numbers that the blocks would stand for; with `fuse_qkv`, queries, keys and
    values in one tensor. `extra` are tensors of a further layer.
    """
    fields = ModelConfig.resolve(folder).hf_config
    name = fields["architectures"][0]
    arch = next(arch for arch, each in ARCHITECTURES.items() if name in (each.name, each.mixture, each.windowed))
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, fields)
    writer.add_block_count(fields["num_hidden_layers"] + bool(extra))
    writer.add_nextn_predict_layers(int(bool(extra)))
    add_rope(writer, fields)
    for key, add in KEYS.items():
        if (value := at(fields, key)) is not None:
            add(writer, value)
    if name in WINDOWED:
        writer.add_sliding_window(fields["sliding_window"] or 0)
        if name in ("Olmo3ForCausalLM", "Exaone4ForCausalLM") and fields["sliding_window"]:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in fields["layer_types"]])
    for key, value in keys.items():
        writer.add_string(key, value)
    if tokenizer:
        add_tokenizer(writer, folder)
    tensors = dict(converted(folder, arch, fields, writer))
    for theirs, array in ((fused(tensors) if fuse_qkv else tensors) | dict(extra)).items():
        kind = kind_of(theirs) if array.ndim > 1 else Kind.F32
        data = gguf.quants.quantize(np.ascontiguousarray(array), kind)
        if dequantized:
            writer.add_tensor(theirs, gguf.quants.dequantize(data, kind).reshape(array.shape))
        else:
            writer.add_tensor(theirs, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Writer = gguf.GGUFWriter
KEYS: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "rms_norm_eps": Writer.add_layer_norm_rms_eps,
    "layer_norm_eps": Writer.add_layer_norm_eps,
    "num_experts": Writer.add_expert_count,
    "num_local_experts": Writer.add_expert_count,
    "n_routed_experts": Writer.add_expert_count,
    "moe_num_experts": Writer.add_expert_count,
    "ffn_config.moe_num_experts": Writer.add_expert_count,
    "num_experts_per_tok": Writer.add_expert_used_count,
    "moe_k": Writer.add_expert_used_count,
    "ffn_config.moe_top_k": Writer.add_expert_used_count,
    "moe_intermediate_size": Writer.add_expert_feed_forward_length,
    "shared_expert_intermediate_size": Writer.add_expert_shared_feed_forward_length,
    "n_shared_experts": Writer.add_expert_shared_count,
    "moe_num_shared_experts": Writer.add_expert_shared_count,
    "first_k_dense_replace": Writer.add_leading_dense_block_count,
    "moe_layer_start_index": Writer.add_leading_dense_block_count,
    "moe_layer_interval": Writer.add_interleave_moe_layer_step,
    "n_group": Writer.add_expert_group_count,
    "topk_group": Writer.add_expert_group_used_count,
    "routed_scaling_factor": Writer.add_expert_weights_scale,
    "norm_topk_prob": Writer.add_expert_weights_norm,
    "logit_scale": Writer.add_logit_scale,
    "logits_scaling": Writer.add_logit_scale,
    "attention_multiplier": Writer.add_attention_scale,
    "embedding_multiplier": Writer.add_embedding_scale,
    "residual_multiplier": Writer.add_residual_scale,
    "attn_logit_softcapping": Writer.add_attn_logit_softcapping,
    "final_logit_softcapping": Writer.add_final_logit_softcapping,
    "clip_qkv": Writer.add_clamp_kqv,
    "attn_config.clip_qkv": Writer.add_clamp_kqv,
    "attn_config.alibi_bias_max": Writer.add_max_alibi_bias,
    "use_parallel_residual": Writer.add_parallel_residual,
}
"""A key of config.json, of a section with a dot -> what writes its value. A config has the keys of its class alone."""
WINDOWED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Cohere2ForCausalLM", "Exaone4ForCausalLM", "Olmo3ForCausalLM",
            "GptOssForCausalLM", "Phi3ForCausalLM")  # fmt: skip
"""Classes whose window is written. Of the others with one, the format has none."""
PERMUTED = {"llama", "arcee", "granite", "granitemoe", "olmo", "smollm3"}
GROUPED = {"gptneox", "bloom", "falcon"}
OFFSET = {"gemma", "gemma2", "gemma3", "nemotron"}
UNTIED = {"gemma", "gemma2", "gemma3", "command-r", "cohere2"}
"""Architectures whose head, if there is one, is not written."""


def at(fields: Mapping[str, Any], key: str) -> Any:
    """The value of a key, in a section if it has a dot."""
    for part in key.split("."):
        fields = (fields or {}).get(part)  # type: ignore[assignment]
    return fields


def add_sizes(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    hidden_size, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    width = fields.get("intermediate_size") or at(fields, "ffn_config.ffn_hidden_size") or 4 * hidden_size
    num_kv_heads = at(fields, "attn_config.kv_n_heads") or fields.get("num_key_value_heads") or num_heads
    is_one = fields["architectures"] == ["FalconForCausalLM"] and not fields["new_decoder_architecture"]
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(width)
    writer.add_head_count(num_heads)
    if "rms_norm_eps" not in fields and "layer_norm_eps" not in fields:
        writer.add_layer_norm_eps(1e-5)
    writer.add_head_count_kv(1 if is_one and fields["multi_query"] else num_kv_heads)
    if fields.get("moe_num_shared_experts"):
        writer.add_expert_shared_feed_forward_length(width // num_kv_heads)
    if fields.get("head_dim"):
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])


def add_rope(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Of layers with a window too, where these have an embedding of their own."""
    section = fields.get("rope_parameters") or {}
    rope = section.get("full_attention", section)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    if "rope_theta" in rope:
        alpha = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(rope["rope_theta"] * alpha)
    if "rope_theta" in rope or fields.get("rotary_dim"):
        rotary_dim = fields.get("rotary_dim") or int(head_dim * rope.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(rotary_dim)
    if "sliding_attention" in section:
        writer.add_rope_freq_base_swa(section["sliding_attention"]["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        scale, original = fields["max_position_embeddings"], rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale / original) / math.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def converted(
    folder: Path, arch: str, fields: Mapping[str, Any], writer: gguf.GGUFWriter
) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor's name in the file, and what is stored there. Tensors that are values of the header are written."""
    num_layers, num_heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), num_layers
    )
    learned: dict[str, list[float]] = {}
    for name, tensor in with_stacks(safetensors.torch.load_file(folder / "model.safetensors"), fields).items():
        array = tensor.float().numpy()
        if ".act_fn." in name:
            learned.setdefault(name.rpartition(".")[2], []).append(float(array.item()))
            continue
        if name == "lm_head.weight" and (fields.get("tie_word_embeddings") or arch in UNTIED):
            continue
        theirs = name_in_file(names, name)
        if arch in PERMUTED and (found := re.search(r"\.([qk])_proj\.", name)):
            array = permuted(array, num_heads if found[1] == "q" else num_kv_heads)
        elif arch in GROUPED and ".query_key_value." in name:
            is_one = arch == "falcon" and not fields["new_decoder_architecture"] and fields["multi_query"]
            array = ungrouped(array, num_heads, 1 if is_one else num_kv_heads)
        elif arch in OFFSET and name.endswith("norm.weight"):
            array = array + np.float32(1)
        elif arch == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight", name):
            array = array.T
        yield theirs, array.squeeze()
    for key, values in learned.items():
        {"alpha_n": writer.add_xielu_alpha_n, "alpha_p": writer.add_xielu_alpha_p, "beta": writer.add_xielu_beta,
         "eps": writer.add_xielu_eps}[key](values)  # fmt: skip


def name_in_file(names: gguf.TensorNameMap, name: str) -> str:
    """The package's name for a tensor, some of which are without a suffix in the checkpoint, or have another prefix."""
    name = name.replace(".sinks", ".sinks.weight").replace("e_score_correction_bias", "e_score_correction.bias")
    for spelling in (name, name.removeprefix("transformer.")):
        if found := names.get_name(spelling, try_suffixes=(".weight", ".bias")):
            return str(found)
    raise KeyError(name)


def fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with queries, keys and values of a layer in one tensor."""
    queries = [name for name in tensors if ".attn_q." in name]
    groups = {name: [name.replace("attn_q", f"attn_{kind}") for kind in "qkv"] for name in queries}
    taken = {name for group in groups.values() for name in group}
    found = {name.replace("attn_q", "attn_qkv"): np.concatenate([tensors[each] for each in group])
             for name, group in groups.items()}  # fmt: skip
    return {name: array for name, array in tensors.items() if name not in taken} | found


def ungrouped(array: np.ndarray, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """The rows of all queries, all keys and all values, from groups of the queries of one key, it and its value."""
    per_group = num_heads // num_kv_heads
    groups = array.reshape(num_kv_heads, per_group + 2, -1, *array.shape[1:])
    parts = groups[:, :per_group], groups[:, per_group:-1], groups[:, -1:]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def with_stacks(tensors: dict[str, torch.Tensor], fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The matrices of experts in one tensor for each layer and projection."""
    stacks: dict[str, list[torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = re.sub(r"block_sparse_moe\.input_linear\.weight", "mlp.experts.gate_up_proj", name)
        name = re.sub(r"block_sparse_moe\.output_linear\.weight", "mlp.experts.down_proj", name)
        before, dot, after = name.partition(".experts.")
        number, _, module = after.partition(".")
        if not dot:
            found[name] = tensor
        elif number.isdecimal():
            stacks.setdefault(f"{before}.experts.{module}", []).append(tensor)
        else:
            found |= dealt(f"{before}.experts", after, tensor, fields)
    return found | {name: torch.stack(stack) for name, stack in stacks.items()}


def dealt(module: str, name: str, tensor: torch.Tensor, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One tensor of a layer's experts as those of its projections."""
    if module.endswith(".ffn.experts"):  # DBRX
        num_experts = fields["ffn_config"]["moe_num_experts"]
        matrices = tensor.view(num_experts, -1, tensor.shape[1])
        return {f"{module}.{name}.weight": matrices.mT if name.endswith("w2") else matrices}
    is_gpt_oss = fields["architectures"] == ["GptOssForCausalLM"]
    kind = "bias" if name.endswith("_bias") else "weight"
    if is_gpt_oss and kind == "weight":
        tensor = tensor.mT
    if name.startswith("down_proj"):
        return {f"{module}.down_proj.{kind}": tensor}
    half = tensor.shape[1] // 2
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else (tensor[:, :half], tensor[:, half:])
    return {f"{module}.gate_proj.{kind}": gate, f"{module}.up_proj.{kind}": up}


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
