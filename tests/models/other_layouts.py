"""Families that only their authors' own code computes: equal models of transformers, saved in their layout."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.models.decoder.reading import alibi_slopes
from tests.models.families import SMALL

Values: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How a family differs from the model of transformers that computes the same."""

    oracle: str
    renames: tuple[tuple[str, str], ...]
    """(regular expression, replacement) for its names."""
    change: Callable[[Any, Values, Tensors], None]
    """What else is different in the model, the config and the tensors."""

    def rewrite(self, folder: Path, model: Any, architecture: str) -> None:
        """Turn the saved model into a checkpoint of the family."""
        path = folder / "config.json"
        values, tensors = json.loads(path.read_text()), load_file(folder / "model.safetensors")
        self.change(model, values, tensors)
        for pattern, replacement in self.renames:
            tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        code = {"AutoModelForCausalLM": "modeling.Model"}
        path.write_text(json.dumps(values | {"architectures": [architecture], "auto_map": code}))


def _projections(tensors: Tensors, ending: str) -> dict[str, list[Tensor]]:
    """By layer, the tensors of queries, keys and values, which are taken out."""
    layers = sorted({name.rpartition(".q_proj")[0] for name in tensors if name.endswith(f".q_proj.{ending}")})
    return {layer: [tensors.pop(f"{layer}.{kind}_proj.{ending}") for kind in "qkv"] for layer in layers}


def _internlm2(model: Any, values: Values, tensors: Tensors) -> None:
    """The queries of a group, its key and its value; then the next group."""
    values["bias"] = values.pop("attention_bias")
    num_groups = values["num_key_value_heads"]
    for ending in ("weight", "bias"):
        for layer, qkv in _projections(tensors, ending).items():
            groups = [part.reshape(num_groups, -1, *part.shape[1:]) for part in qkv]
            tensors[f"{layer}.wqkv.{ending}"] = torch.cat(groups, 1).flatten(0, 1)


def _baichuan(model: Any, values: Values, tensors: Tensors) -> None:
    for layer, qkv in _projections(tensors, "weight").items():
        tensors[f"{layer}.W_pack.weight"] = torch.cat(qkv)
    if "z_loss_weight" in values:
        model.lm_head.weight.data = torch.nn.functional.normalize(tensors["lm_head.weight"])
    if "model_max_length" in values:
        del values["max_position_embeddings"]
        model.model.rotary_emb.inv_freq.zero_()  # no head is turned
        slopes = torch.tensor(alibi_slopes(values["num_attention_heads"]))[:, None, None]
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | {"attention_mask": _alibi(slopes, args[0].shape[1])}),
                with_kwargs=True,
            )


def _alibi(slopes: Tensor, length: int) -> Tensor:
    """What is added to scores, [1, num_heads, length, length]."""
    positions = torch.arange(length)
    distances = positions[None] - positions[:, None]
    return (slopes * distances).masked_fill(distances > 0, -torch.inf)[None]


def _minicpm(model: Any, values: Values, tensors: Tensors) -> None:
    values["scale_emb"] = values.pop("embedding_multiplier")
    values["scale_depth"] = values.pop("residual_multiplier") * values["num_hidden_layers"] ** 0.5
    values["dim_model_base"] = values["hidden_size"] / values.pop("logits_scaling")
    del values["attention_multiplier"]


def _exaone(model: Any, values: Values, tensors: Tensors) -> None:
    for ours, theirs in (
        ("num_hidden_layers", "num_layers"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
    ):
        values[theirs] = values.pop(ours)


LAYOUTS = {
    "InternLM2ForCausalLM": Layout(
        "LlamaForCausalLM",
        (
            ("embed_tokens", "tok_embeddings"),
            ("^lm_head", "output"),
            ("self_attn", "attention"),
            ("o_proj", "wo"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ),
        _internlm2,
    ),
    "BaichuanForCausalLM": Layout("LlamaForCausalLM", (), _baichuan),
    "MiniCPMForCausalLM": Layout("GraniteForCausalLM", (), _minicpm),
    "ExaoneForCausalLM": Layout(
        "LlamaForCausalLM",
        (
            ("^model.", "transformer."),
            ("embed_tokens", "wte"),
            (r"\.layers\.", ".h."),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("transformer.norm", "transformer.ln_f"),
            ("self_attn", "attn.attention"),
            ("o_proj", "out_proj"),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ),
        _exaone,
    ),
}
"""By architecture; its variants are given with the fields of the oracle's config."""

_MANY_KEYS = SMALL | {"num_key_value_heads": 4}
_MINICPM = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "attention_multiplier": 8**-0.5,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2": ("InternLM2ForCausalLM", SMALL),
    "internlm2-biases": ("InternLM2ForCausalLM", SMALL | {"attention_bias": True, "num_key_value_heads": 1}),
    "baichuan-7b": ("BaichuanForCausalLM", _MANY_KEYS),
    "baichuan-13b": (
        "BaichuanForCausalLM",
        _MANY_KEYS | {"model_max_length": 128, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48},
    ),
    "baichuan2": ("BaichuanForCausalLM", _MANY_KEYS | {"z_loss_weight": 0.0}),
    "minicpm": ("MiniCPMForCausalLM", SMALL | _MINICPM | {"tie_word_embeddings": True, "table_scale": 0.03}),
    "minicpm-untied": ("MiniCPMForCausalLM", SMALL | _MINICPM | {"num_hidden_layers": 3}),
    "exaone3": ("ExaoneForCausalLM", SMALL),
    "exaone3-llama3-tied": (
        "ExaoneForCausalLM",
        SMALL | {"tie_word_embeddings": True} | {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 32}},
    ),
}
"""architecture and fields of its oracle's config"""
