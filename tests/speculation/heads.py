"""Draft heads with random weights in each format of checkpoints, and what they compute, written from the papers.

EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), and the multi-token prediction of DeepSeek-V3 (2412.19437).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.config.checkpoint.location import EMBEDDED_ROOT

TINY = EMBEDDED_ROOT / "quire-tiny"
VOCAB, WIDTH = 8192, 256
SHAPE = {"hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG: dict[str, Any] = SHAPE | {
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}


@dataclass
class Head:
    """What a head is: its tensors by the oracle's names, and how it combines them."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    places: tuple[int, ...] = ()
    """Of EAGLE-3: the layers whose inputs it reads."""
    is_state_first: bool = False
    passes_norm: bool = False
    adds_to_norm: bool = False

    @property
    def d2t(self) -> Tensor | None:
        return self.tensors.get("d2t")


def layer_tensors(rng: torch.Generator, config: Mapping[str, Any], inputs: int) -> dict[str, Tensor]:
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * dim, inputs),
        "self_attn.k_proj": (kv_heads * dim, inputs),
        "self_attn.v_proj": (kv_heads * dim, inputs),
        "self_attn.o_proj": (width, heads * dim),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    return {f"layers.0.{name}.weight": matrix(rng, *shape) for name, shape in shapes.items()} | {
        "layers.0.post_attention_layernorm.weight": norm(rng, width)
    }


def matrix(rng: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=rng) * (2.0 / columns) ** 0.5


def norm(rng: torch.Generator, width: int) -> Tensor:
    return 0.5 + torch.rand(width, generator=rng)


def eagle(seed: int = 0, *, bias: bool = False, has_head: bool = False, has_norms: bool = False) -> Head:
    rng = torch.Generator().manual_seed(seed)
    tensors = layer_tensors(rng, CONFIG, WIDTH) | {"fc.weight": matrix(rng, WIDTH, 2 * WIDTH)}
    if bias:
        tensors["fc.bias"] = torch.randn(WIDTH, generator=rng)
    if has_norms:
        tensors |= {
            f"{name}.weight": norm(rng, WIDTH) for name in ("token_norm", "out_norm", "layers.0.input_layernorm")
        }
    if has_head:
        tensors |= {"lm_head.weight": matrix(rng, VOCAB, WIDTH), "embed_tokens.weight": matrix(rng, VOCAB, WIDTH)}
    return Head(tensors, dict(CONFIG))


def eagle3(seed: int = 0, *, width: int = WIDTH, vocab: int = 500, adds_to_norm: bool = False, **config: Any) -> Head:
    rng = torch.Generator().manual_seed(seed)
    config = CONFIG | {"hidden_size": width, "draft_vocab_size": vocab} | config
    tensors = layer_tensors(rng, config, 2 * width) | {"fc.weight": matrix(rng, width, 3 * WIDTH)}
    tensors |= {f"layers.0.{name}.weight": norm(rng, width) for name in ("input_layernorm", "hidden_norm")}
    tensors |= {"out_norm.weight": norm(rng, width), "lm_head.weight": matrix(rng, vocab, width)}
    if width != WIDTH:
        tensors["embed_tokens.weight"] = matrix(rng, VOCAB, width)
    if vocab != VOCAB:
        targets = torch.randperm(VOCAB, generator=rng)[:vocab].sort().values
        tensors["d2t"] = targets - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, targets, True)
    return Head(
        tensors, config, tuple(config.get("eagle_aux_hidden_state_layer_ids", (2, 3, 3))), adds_to_norm=adds_to_norm
    )


def mtp(name: str) -> Head:
    """A layer of Llama's kind."""
    head = eagle(5)
    rng = torch.Generator().manual_seed(6)
    norms = ["token_norm", "state_norm", "layers.0.input_layernorm"] + ["norm"] * (name in ("mimo", "qwen"))
    head.tensors |= {f"{name}.weight": norm(rng, WIDTH) for name in norms}
    head.is_state_first, head.passes_norm = name == "mimo", "norm" in norms
    head.config |= {"head_dim": 64, "intermediate_size": 768}
    head.tensors |= layer_tensors(rng, head.config, WIDTH)
    return head


EAGLE_NAMES = {"out_norm": "norm"}
EAGLE3_NAMES = {"out_norm": "norm", "layers.0": "midlayer"}
SPECULATORS_EAGLE_NAMES = {
    "fc": "fusion_fc",
    "layers.0": "transformer",
    "token_norm": "embedding_layernorm",
    "out_norm": "pre_lm_head_layernorm",
}


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    def rename(name: str) -> str:
        for ours, theirs in names.items():
            if name.startswith(f"{ours}."):
                return theirs + name.removeprefix(ours)
        return name

    return {rename(name): tensor for name, tensor in tensors.items()}


def write(folder: Path, head: Head, names: Mapping[str, str], **config: Any) -> Path:
    """In the original format of EAGLE: the values of the layers' config at the top."""
    folder.mkdir(exist_ok=True)
    save_file(renamed(head.tensors, names), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config | config))
    return folder


def write_speculators(folder: Path, head: Head, names: Mapping[str, str], kind: str, verifier: str | None) -> Path:
    """In the `speculators` format."""
    write(folder, head, names)
    section = {"algorithm": kind, "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    section["verifier"] = {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]}
    config = {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": section,
        "transformer_layer_config": head.config,
        "draft_vocab_size": head.config.get("draft_vocab_size"),
        "norm_before_residual": head.adds_to_norm,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def tiny() -> Any:
    """The model that is drafted for, as transformers computes it in float32."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


class Oracle:
    """Drafts by a head, computed in float32 from the whole sequence."""

    def __init__(self, head: Head, model: Any = None) -> None:
        self.head, self.model = head, tiny() if model is None else model
        self.weights = {name: tensor.float() for name, tensor in head.tensors.items()}
        get = self.weights.get
        self.table = get("embed_tokens.weight", self.model.get_input_embeddings().weight.detach())
        self.projection = get("lm_head.weight", self.model.get_output_embeddings().weight.detach())

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], num: int) -> tuple[list[int], list[float]]:
        """The `num` likeliest tokens behind these, one after another, and their probabilities."""
        states, token_ids, found, odds = self.states(token_ids[:-1]), list(token_ids[1:]), [], []
        while True:
            hidden = self.layer(self.table[torch.tensor(token_ids)], states)
            probabilities = self.logits(hidden[-1]).softmax(-1)
            best = int(probabilities.argmax())
            target = best if self.head.d2t is None else best + int(self.head.d2t[best])
            found.append(target)
            odds.append(float(probabilities[best]))
            if len(found) == num:
                return found, odds
            token_ids.append(target)
            states = torch.cat([states, hidden[-1:]])

    def states(self, token_ids: Sequence[int]) -> Tensor:
        """What the head reads of the model, for each token."""
        out = self.model(torch.tensor([token_ids]), output_hidden_states=True)
        if not self.head.places:
            return out.hidden_states[-1][0]
        return torch.cat([out.hidden_states[place][0] for place in self.head.places], -1) @ self.weights["fc.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(1))

    def layer(self, embeddings: Tensor, states: Tensor) -> Tensor:
        if self.head.places:
            normed = self.norm("layers.0.hidden_norm", states)
            x = torch.cat([self.norm("layers.0.input_layernorm", embeddings), normed], -1)
            residual = normed if self.head.adds_to_norm else states
        else:
            pair = [self.norm("token_norm", embeddings), self.norm("state_norm", states)]
            residual = self.linear("fc", torch.cat(pair[::-1] if self.head.is_state_first else pair, -1))
            x = self.norm("layers.0.input_layernorm", residual)
        residual = residual + self.attention(x)
        x = self.norm("layers.0.post_attention_layernorm", residual)
        gated = torch.nn.functional.silu(self.linear("layers.0.mlp.gate_proj", x)) * self.linear(
            "layers.0.mlp.up_proj", x
        )
        out = residual + self.linear("layers.0.mlp.down_proj", gated)
        return self.norm("norm", out) if self.head.passes_norm else out

    def attention(self, x: Tensor) -> Tensor:
        config, length = self.head.config, len(x)
        dim, groups = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
        query, key, value = (
            self.linear(f"layers.0.self_attn.{name}_proj", x).view(length, -1, dim).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(length)[:, None] * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))

        def rotate(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, -1)
            return heads * cos + torch.cat([-second, first], -1) * sin

        key, value = (each.repeat_interleave(groups, 0) for each in (rotate(key), value))
        scores = rotate(query) @ key.transpose(1, 2) / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        return self.linear("layers.0.self_attn.o_proj", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.norm("out_norm", hidden) @ self.projection.T


MTP_NAMES: Mapping[str, dict[str, str]] = {
    "deepseek": {
        "token_norm": "model.layers.6.enorm",
        "state_norm": "model.layers.6.hnorm",
        "fc": "model.layers.6.eh_proj",
        "out_norm": "model.layers.6.shared_head.norm",
        "layers.0": "model.layers.6",
    },
    "ernie": {
        "token_norm": "model.mtp_emb_norm.0",
        "state_norm": "model.mtp_hidden_norm.0",
        "fc": "model.mtp_linear_proj.0",
        "layers.0": "model.mtp_block.0",
    },
    "mimo": {
        "token_norm": "model.mtp_layers.0.token_layernorm",
        "state_norm": "model.mtp_layers.0.hidden_layernorm",
        "fc": "model.mtp_layers.0.input_proj",
        "norm": "model.mtp_layers.0.final_layernorm",
        "layers.0": "model.mtp_layers.0",
    },
    "qwen": {
        "token_norm": "mtp.pre_fc_norm_embedding",
        "state_norm": "mtp.pre_fc_norm_hidden",
        "fc": "mtp.fc",
        "norm": "mtp.norm",
        "layers.0": "mtp.layers.0",
    },
}


def load_tiny() -> dict[str, Tensor]:
    return load_file(TINY / "model.safetensors")
