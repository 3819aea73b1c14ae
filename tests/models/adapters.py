"""Adapters of random weights in PEFT's format, and models that have them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from quire.common.batch import Batch, Draw, DrawnRows, ScheduledSequence, TokenLogprobs
from quire.config.kv_layout import kv_cache_config
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.models.registry import model_class
from quire.runner.worker import Worker

BLOCK_SIZE = 4
LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, prefix: str = "base_model.model.", **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "target_modules": None, "lora_dropout": 0.1, "inference_mode": True} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(named, folder / "adapter_model.safetensors")
    return folder


def make_tensors(sizes: Mapping[str, tuple[int, int]], rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Factors for modules of (outputs, inputs), large enough to change every token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (n, k) in sizes.items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, k, generator=generator) / k**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(n, rank, generator=generator) / rank**0.5
    return tensors


def tiny_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The modules of a small Llama and their sizes."""
    hf = config.hf_config
    hidden, mlp, heads = hf["hidden_size"], hf["intermediate_size"], hf["num_attention_heads"]
    kv = hf.get("num_key_value_heads", heads) * hf.get("head_dim", hidden // heads)
    own = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    own |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}
    own |= {"mlp.down_proj": (hidden, mlp)}
    layers = range(hf["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": size for layer in layers for name, size in own.items()}


class Steps:
    """A worker, and sequences with blocks of their own, which run any number of tokens a step."""

    def __init__(self, config: ModelConfig, prompts: Sequence[Sequence[int]], lora: LoRAConfig | None) -> None:
        self.config = config
        specs = model_class(config.architecture).kv_cache_specs(config)
        num_blocks = -(-max(map(len, prompts)) // BLOCK_SIZE)
        kv_cache = kv_cache_config(specs, BLOCK_SIZE, num_blocks=num_blocks * len(prompts) * len(specs))
        self.worker = Worker(config, kv_cache, ParallelConfig(None), "raw_logits", lora)
        ids = np.arange(kv_cache.num_blocks, dtype=np.int32).reshape(len(prompts), len(specs), -1)
        self.tables = [tuple(rows[: len(kv_cache.groups)]) for rows in ids]
        self.prompts = [list(prompt) for prompt in prompts]
        self.restart()

    def restart(self, adapters: Sequence[int] | None = None) -> None:
        """Begin all sequences again, with the adapters in these slots."""
        self.adapters = [-1] * len(self.prompts) if adapters is None else list(adapters)
        self.computed = [0] * len(self.prompts)

    def step(self, counts: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Run the next `counts[s]` tokens of each sequence. Returns the logits [vocab] after the last, by sequence."""
        scheduled = []
        for s, count in counts.items():
            start = self.computed[s]
            self.computed[s] += count
            tokens = tuple(self.prompts[s][start : start + count])
            drawn = DrawnRows((Draw(0.0, 0, 1.0, b"", logprobs=self.config.vocab_size),), 0)
            scheduled.append(ScheduledSequence(s, tokens, start, self.tables[s], drawn, adapter=self.adapters[s]))
        result = self.worker.execute(Batch(0, tuple(scheduled)))
        return {s: _by_token(result.logprobs[i]) for i, s in enumerate(counts)}

    def run(self, s: int, *counts: int) -> list[np.ndarray]:
        """Run one sequence alone in steps of these numbers of tokens."""
        return [self.step({s: count})[s] for count in counts]


def _by_token(top: TokenLogprobs) -> np.ndarray:
    logits = np.full(top.token_ids.max() + 1, np.nan, np.float32)
    logits[top.token_ids[0, 1:]] = top.logprobs[0, 1:]
    return logits
