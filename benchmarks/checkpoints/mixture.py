"""A GGUF file in Qwen3-30B-A3B's shape with random Q4_0 blocks, cut to a few layers and with a small vocabulary.

The blocks are drawn, not quantized, so that a file of gigabytes is written as fast as the disk takes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.checkpoints.dense import train_tokenizer
from benchmarks.drivers.convert_to_gguf import add_vocabulary

_BLOCK = 32
_BLOCK_BYTES = 18
"""A float16 scale and 32 integers of 4 bits."""


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The sizes of Qwen3-30B-A3B, but for the layers and the vocabulary."""

    num_layers: int = 4
    """48 in the original."""
    vocab: int = 8192
    """151,936 in the original; with 4 layers its head would be most of what a token reads."""
    hidden: int = 2048
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    num_experts: int = 128
    top_k: int = 8
    expert_width: int = 768

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The shape of each quantized tensor of a layer."""
        q, kv, hidden = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.hidden
        experts, width = self.num_experts, self.expert_width
        return {
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_gate_exps": (experts, width, hidden),
            "ffn_up_exps": (experts, width, hidden),
            "ffn_down_exps": (experts, hidden, width),
        }

    @property
    def num_params_per_token(self) -> int:
        """Weights in the products of one token: attention, routers, chosen experts and the head."""
        shapes = self.matrices()
        attention = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
        experts = 3 * self.top_k * self.hidden * self.expert_width
        router = self.num_experts * self.hidden
        return self.num_layers * (attention + experts + router) + self.vocab * self.hidden


def ensure_mixture(path: Path, shape: MixtureShape) -> Path:
    """Write the file unless it exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        _write(unfinished, shape)
        unfinished.rename(path)
    return path


def _write(path: Path, shape: MixtureShape) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _add_settings(writer, shape)
    tokenizer = train_tokenizer()
    add_vocabulary(writer, tokenizer.to_str(), shape.vocab)
    kinds = {"float": gguf.GGMLQuantizationType.F32, "blocks": gguf.GGMLQuantizationType.Q4_0}
    tensors = list(_tensors(shape))
    for name, sizes, kind in tensors:
        num_bytes = int(np.prod(sizes)) * 4 if kind == "float" else int(np.prod(sizes)) // _BLOCK * _BLOCK_BYTES
        stored = sizes if kind == "float" else (*sizes[:-1], sizes[-1] // _BLOCK * _BLOCK_BYTES)
        dtype = np.dtype(np.float32 if kind == "float" else np.uint8)
        writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for name, sizes, kind in tensors:
        values = _values(generator, name, sizes) if kind == "float" else _blocks(generator, name, sizes)
        writer.write_tensor_data(values)
    writer.close()


def _add_settings(writer: Any, shape: MixtureShape) -> None:
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.expert_width)


def _tensors(shape: MixtureShape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The name, the shape and the kind of each tensor."""
    yield "token_embd.weight", (shape.vocab, shape.hidden), "blocks"
    for layer in range(shape.num_layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (shape.hidden,), "float"
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"blk.{layer}.{name}.weight", (shape.head_dim,), "float"
        yield f"blk.{layer}.ffn_gate_inp.weight", (shape.num_experts, shape.hidden), "float"
        for name, sizes in shape.matrices().items():
            yield f"blk.{layer}.{name}.weight", sizes, "blocks"
    yield "output_norm.weight", (shape.hidden,), "float"
    yield "output.weight", (shape.vocab, shape.hidden), "blocks"


def _values(generator: np.random.Generator, name: str, sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Ones for norms, and normal values for routers."""
    if "norm" in name:
        return np.ones(sizes, np.float32)
    return generator.standard_normal(sizes, np.float32) * np.float32(0.02)


def _blocks(generator: np.random.Generator, name: str, sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random integers from -8 to 7, whose standard deviation is about 4.6, times scales that make it 0.02.

    Tokens must differ, or all of them go to the same experts: the signs of the scales are random, so that weights have
    no mean, and the token table is large, so that what layers add does not hide the token.
    """
    std = 1.0 if name.startswith("token_embd") else 0.02
    num_blocks = int(np.prod(sizes)) // _BLOCK
    blocks = (
        np.frombuffer(generator.bytes(num_blocks * _BLOCK_BYTES), np.uint8).reshape(num_blocks, _BLOCK_BYTES).copy()
    )
    signs = np.where(blocks[:, :1].view(np.int8) < 0, -1, 1)
    blocks[:, :2] = (signs * (std / 4.6)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*sizes[:-1], -1)
