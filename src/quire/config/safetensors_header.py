"""The header of a safetensors file, checked before anything in the file is believed. Pure Python, no tensors.

Layout: 8 bytes little-endian header length; that many bytes of JSON, `{name: {dtype, shape, data_offsets}}`; the data,
without holes or overlaps. Format: https://github.com/huggingface/safetensors
"""

import json
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from quire.common.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `num_bytes` bytes at `offset` from the start of the file."""

    name: str
    dtype: str
    """as the format spells it: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of `path` by name, in file order. Raises CheckpointError saying what is wrong with the file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is truncated: {file_bytes} bytes, not even a header length")
            if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(
                    f"{path} says its header has {header_bytes} bytes, but the file has {file_bytes}: "
                    "truncated, or not a safetensors file"
                )
            header = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    entries = _parse(path, header)
    entries.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = [_tensor(path, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_layout(path, tensors, data_start, file_bytes)
    return {tensor.name: tensor for tensor in tensors}


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("a key appears twice")
        return names

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the safetensors header is a JSON {type(entries).__name__}, not an object")
    return entries


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {reprlib.repr(name)} {what}")

    if not isinstance(entry, dict):
        raise wrong("has an entry in the header that is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise wrong(f"has dtype {reprlib.repr(dtype)}, known are {', '.join(_ITEM_BYTES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}: malformed")
    num_bytes = offsets[1] - offsets[0]
    needed = math.prod(shape) * _ITEM_BYTES[dtype]
    if needed != num_bytes:
        raise wrong(
            f"of shape {shape} and dtype {dtype} needs {needed} bytes, but its data_offsets {offsets} span {num_bytes}"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    is_short = isinstance(value, list) and len(value) <= _MAX_DIMENSIONS
    return is_short and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _check_layout(path: Path, tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors, sorted by offset, must follow each other from the start of the data to the end of the file."""
    end, before = data_start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a hole after"
            names = f"{reprlib.repr(tensor.name)} {what} {reprlib.repr(before)}"
            raise CheckpointError(f"{path}: tensor {names}: the header lies about offsets")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header promises {end} bytes, the file has {file_bytes} (download it again)"
        )
    if end < file_bytes:
        raise CheckpointError(f"{path} has {file_bytes - end} bytes after its last tensor: not what its header says")
