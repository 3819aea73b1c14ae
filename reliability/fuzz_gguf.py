"""GGUF files as a target of reliability.fuzz: header, config, tensors and tokenizer."""

from __future__ import annotations

import math
import struct
from typing import Any

from quire.common.errors import CheckpointError
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.gguf.header import read_header
from quire.config.model import ModelConfig
from quire.text.tokenizer.tokenizer import Tokenizer
from reliability.fuzz_target import Target, refusal, scratch


def gguf(data: bytes) -> str:
    """Check that every tensor of an accepted file lies within it, that its config is complete, and that its tokenizer
    encodes and decodes."""
    path = scratch(data, "input.gguf")
    try:
        for tensor in read_header(path).tensors.values():
            assert 0 < tensor.num_bytes <= len(data) - tensor.offset
            assert tensor.num_bytes % math.prod(tensor.shape) == 0
        config = ModelConfig.resolve(path)
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            with checkpoint.reading(name) as read:
                assert len(read) == checkpoint.tensors[name].num_bytes
        assert config.vocab_size <= len(data)
        tokenizer = Tokenizer.from_path(path)
        tokenizer.decode(tokenizer.encode("ab <s>a b"))
    except CheckpointError as error:
        return refusal(error, len(str(error)) < 4000, "a short message")
    return ""


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    """A value with its type before it."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [*items]:
            encoded = [_value(item) for item in items]
            start = struct.pack("<I", 9) + encoded[0][:4] + struct.pack("<Q", len(items))
            return start + b"".join(each[4:] for each in encoded)
    raise TypeError(value)


def _file(**changes: Any) -> bytes:
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {"token_embd.weight": (8, 4), "blk.0.attn_q.weight": (8, 8)}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_text(key) + _value(value) for key, value in keys.items())
    offset = 0
    for name, dimensions in tensors.items():
        head += _text(name) + struct.pack("<I2QIQ", 2, *dimensions, 0, offset)
        offset += 4 * math.prod(dimensions)
    return head + bytes(-len(head) % 32) + bytes(offset)


def _corpus() -> list[bytes]:
    spm: dict[str, Any] = {"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": [0.0, -1.0, -2.0, -3.0]}
    return [
        _file(),
        _file(**spm, tokenizer__ggml__add_space_prefix=False),
        _file(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0),
        _file(split__count=2, split__no=0),
        _file(general__alignment=64),
    ]


_NUMBERS = tuple(struct.pack("<Q", number) for number in (0, 1, 2**30, 2**31, 2**62, 2**63, 2**64 - 1))
TARGETS = {
    "gguf": Target(gguf, _corpus, (*_NUMBERS, *b"llama qwen2 yarn tokenizer.ggml.scores rope_freqs.weight".split()))
}
"""Targets by name."""
