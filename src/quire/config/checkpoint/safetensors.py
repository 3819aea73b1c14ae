"""Safetensors folders: one file, or several and an index. A header is checked before anything in it is used.

A file is 8 bytes of little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}` of that length,
and the data, without holes or overlaps. Format: https://github.com/huggingface/safetensors
"""

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from quire.common.errors import CheckpointError
from quire.config.checkpoint.tensors import MappedCheckpoint, MappedTensor, named
from quire.config.hf_config import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "U16": ("uint16", 2), "I16": ("int16", 2)}
DTYPES |= {"F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F16": ("float16", 2)}
DTYPES |= {"BF16": ("bfloat16", 2), "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4)}
DTYPES |= {"U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8)}
"""For each dtype by its name in the format: its name in torch, and the bytes of an element."""

_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64


def open_safetensors(folder: Path) -> MappedCheckpoint:
    """The tensors of `folder`, headers validated. Raises CheckpointError if a file is missing or malformed."""
    tensors: dict[str, MappedTensor] = {}
    for path, names in _weight_files(folder).items():
        header = read_header(path)
        missing = sorted(set(names or ()) - header.keys())
        if missing:
            raise CheckpointError(
                f"{path} lacks {len(missing)} tensor(s) that {INDEX_FILE} assigns to it: {named(missing)}"
            )
        tensors |= header if names is None else {name: header[name] for name in names}
    return MappedCheckpoint(tensors)


def read_header(path: Path) -> dict[str, MappedTensor]:
    """Return all tensors of `path` by name, in the order of the file. Raises CheckpointError for a malformed file."""
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


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> MappedTensor:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {reprlib.repr(name)} {what}")

    if not isinstance(entry, dict):
        raise wrong("has an entry in the header that is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"has dtype {reprlib.repr(dtype)}, known are {', '.join(DTYPES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}: malformed")
    num_bytes = offsets[1] - offsets[0]
    name_in_torch, item_bytes = DTYPES[dtype]
    needed = math.prod(shape) * item_bytes
    if needed != num_bytes:
        raise wrong(
            f"of shape {shape} and dtype {dtype} needs {needed} bytes, but its data_offsets {offsets} span {num_bytes}"
        )
    return MappedTensor(name, name_in_torch, tuple(shape), num_bytes, path, data_start + offsets[0])


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    is_short = isinstance(value, list) and len(value) <= _MAX_DIMENSIONS
    return is_short and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _check_layout(path: Path, tensors: list[MappedTensor], data_start: int, file_bytes: int) -> None:
    """Tensors, sorted by offset, must follow each other from the start of the data to the end of the file."""
    end, before = data_start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a hole after"
            names = f"{reprlib.repr(tensor.name)} {what} {reprlib.repr(before)}"
            raise CheckpointError(f"{path}: tensor {names}: the offsets in its header are wrong")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header promises {end} bytes, the file has {file_bytes} (download it again)"
        )
    if end < file_bytes:
        raise CheckpointError(f"{path} has {file_bytes - end} bytes after its last tensor: not what its header says")


def _weight_files(folder: Path) -> Mapping[Path, list[str] | None]:
    """Files to open, and the tensors to take from each (None: all it has)."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if single.is_file():
        return {single: None}
    if index.is_file():
        return _indexed_files(folder, index)
    raise CheckpointError(f"{folder} has safetensors files, but neither {SINGLE_FILE} nor {INDEX_FILE}: incomplete")


def _indexed_files(folder: Path, index: Path) -> Mapping[Path, list[str] | None]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {name[:80]!r} in {str(file)[:80]!r}: must be a safetensors file of the same folder"
            )
        by_file.setdefault(file, []).append(name)
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    if absent := next((file for file in by_file if file not in present), None):
        raise CheckpointError(
            f"{folder} lacks the weight file {named([absent])}, which {INDEX_FILE} names (download it again)"
        )
    return {folder / file: names for file, names in by_file.items()}
