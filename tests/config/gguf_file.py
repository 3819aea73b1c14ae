"""GGUF files written byte by byte, so that any part can be wrong."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", 5: "i", F32: "f", BOOL: "B", U64: "Q", 11: "q", 12: "d"}


class Typed(NamedTuple):
    """A value whose type is not the usual one of its Python type."""

    type: int
    value: Any


class Stored(NamedTuple):
    """A tensor: its dimensions, the innermost first, and the number of its type. No offset: behind the one before."""

    name: str
    dimensions: Sequence[int] = (4,)
    type: int = 0
    data: bytes = bytes(16)
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> Typed:
    """A value with the type that files usually have for it."""
    if isinstance(value, Typed):
        return value
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING, bytes: STRING, list: ARRAY}
    return Typed(kinds[type(value)], value)


def encoded(value: Any) -> bytes:
    """A value with its type before it."""
    kind, plain = typed(value)
    return struct.pack("<I", kind) + payload(kind, plain)


def payload(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        items = [typed(item) for item in value]
        item_kind = items[0].type if items else STRING
        body = b"".join(payload(item.type, item.value) for item in items)
        return struct.pack("<IQ", item_kind, len(items)) + body
    return struct.pack(f"<{_CODES.get(kind, 'I')}", value)


def gguf_bytes(
    keys: dict[str, Any] | Sequence[tuple[Any, Any]] = (),
    tensors: Sequence[Stored] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A file. The counts are those of what is there, unless given."""
    pairs = list(keys.items()) if isinstance(keys, dict) else list(keys)
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(string(key) + encoded(value) for key, value in pairs)
    data = b""
    for tensor in tensors:
        at = len(data) if tensor.offset is None else tensor.offset
        head += string(tensor.name) + struct.pack("<I", len(tensor.dimensions))
        head += struct.pack(f"<{len(tensor.dimensions)}QIQ", *tensor.dimensions, tensor.type, at)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + (bytes(-len(head) % alignment) + data if tensors else b"")


def write_gguf(path: Path, *arguments: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(*arguments, **options))
    return path


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}
TABLE = Stored("token_embd.weight", (16, 8), 0, bytes(16 * 8 * 4))


def model_bytes(keys: dict[str, Any] | None = None, *tensors: Stored, **options: Any) -> bytes:
    """A model without layers' weights: the header of a Llama with these keys changed (None: left out)."""
    merged = {key: value for key, value in (LLAMA | (keys or {})).items() if value is not None}
    return gguf_bytes(merged, [TABLE, *tensors], **options)


def header_of(architecture: str, **keys: Any) -> dict[str, Any]:
    """The header of LLAMA for another architecture, with these of its keys changed or added (`__` for a dot)."""
    renamed = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()}
    changes = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return renamed | {"general.architecture": architecture} | changes
