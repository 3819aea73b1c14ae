"""Vocabularies other than tokenizer.json as targets of reliability.fuzz: SentencePiece, tekken.json and tiktoken."""

from __future__ import annotations

import base64
import json
import struct
from functools import partial
from typing import Any

from quire.common.errors import TokenizerError
from quire.text.tokenizer.tokenizer import Tokenizer
from reliability.fuzz_target import JSON, Target, folder, refusal

_TEXT = "ab <s>a b\n<0x41>é 12"


def vocabulary(name: str, data: bytes) -> str:
    """Check that the tokenizer of an accepted file encodes and decodes, with ids that it has."""
    place = folder(name)
    (place / name).write_bytes(data)
    try:
        tokenizer = Tokenizer.from_path(place)
    except TokenizerError as error:
        return refusal(error, len(str(error)) < 4000, "a short message")
    try:
        ids = tokenizer.encode(_TEXT)
    except TokenizerError as error:  # rules of normalization are checked where they are applied
        return refusal(error)
    assert all(tokenizer.token_of(i) is not None for i in ids)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.pending() == tokenizer.decode(ids)
    return ""


# --- messages of protocol buffers


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _message(fields: dict[int, Any]) -> bytes:
    """The encoded fields, of which a list is repeated."""
    encoded = b""
    for number, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int):
                encoded += _varint(number << 3) + _varint(each)
            elif isinstance(each, float):
                encoded += _varint(number << 3 | 5) + struct.pack("<f", each)
            else:
                data = each.encode() if isinstance(each, str) else each
                encoded += _varint(number << 3 | 2) + _varint(len(data)) + data
    return encoded


def _sentencepiece(trainer: dict[int, Any], normalizer: dict[int, Any], num_bytes: int = 0) -> bytes:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(num_bytes)]
    pieces += [(token, -float(i), 1) for i, token in enumerate(["▁", "a", "b", "ab", "▁a", "▁▁"])] + [("\n", 0.0, 4)]
    encoded = [_message({1: token, 2: score, 3: kind}) for token, score, kind in pieces]
    return _message({1: encoded, 2: _message(trainer), 3: _message(normalizer)})


def _sentencepiece_corpus() -> list[bytes]:
    return [
        _sentencepiece({3: 2, 40: 0, 41: 1, 42: 2, 43: 2**64 - 1}, {1: "identity", 3: 1, 4: 0}),
        _sentencepiece({3: 2, 35: 1}, {3: 0, 4: 1}, num_bytes=256),
        _sentencepiece({3: 1}, {3: 1, 4: 1, 5: 1}),
        _sentencepiece({3: 1, 24: 0}, {2: struct.pack("<I4I", 16, 1, 2, 3, 4) + b"a\0b\0"}),
    ]


# --- tokens in base64

_BYTES = [bytes([byte]) for byte in range(256)]
_TOKENS = [base64.b64encode(token).decode() for token in [*_BYTES, b"ab", b" a", b"  ", b"\xc3\xa9"]]


_ENTRIES = [{"rank": rank, "token_bytes": token, "token_str": "text"} for rank, token in enumerate(_TOKENS)]
_VOCAB = b'"vocab": ['


def tekken(data: bytes) -> str:
    """Check a tekken.json, to whose vocabulary the 256 bytes are added: inputs may not be so long."""
    entries = json.dumps(_ENTRIES[:256]).encode()[1:-1]
    return vocabulary("tekken.json", data.replace(_VOCAB, _VOCAB + entries + b", "))


def _tekken_corpus() -> list[bytes]:
    sizes = {"pattern": r" ?\w+|\s+|.", "default_vocab_size": len(_ENTRIES) + 4, "default_num_special_tokens": 4}
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(["<unk>", "<s>", "</s>"])]
    whole = {"config": sizes | {"version": "v3"}, "vocab": _ENTRIES[256:], "special_tokens": special}
    return [json.dumps(given).encode() for given in (whole, whole | {"special_tokens": []})]


def _tiktoken_corpus() -> list[bytes]:
    lines = [f"{token} {rank}\n".encode() for rank, token in enumerate(_TOKENS)]
    return [b"".join(lines), b"".join(lines[::-1])]


_VARINTS = tuple(_varint(number) for number in (0, 1, 127, 128, 2**30, 2**31, 2**32, 2**63, 2**64 - 1))
_KEYS = b"token_bytes rank vocab special_tokens default_vocab_size pattern (?<=a) \\p{Han}+ (a|a)*b".split()
TARGETS = {
    "sentencepiece": Target(
        partial(vocabulary, "tokenizer.model"),
        _sentencepiece_corpus,
        (*_VARINTS, struct.pack("<f", float("nan")), b"<0x41>", b"\xe2\x96\x81"),
    ),
    "tekken": Target(tekken, _tekken_corpus, (*JSON, *_KEYS)),
    "tiktoken": Target(
        partial(vocabulary, "qwen.tiktoken"), _tiktoken_corpus, (b"\n", b" ", b"=", b"-1", b"4294967296", b"YWI= 256")
    ),
}
"""Targets by name."""
