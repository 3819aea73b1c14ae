"""The header of a GGUF file: metadata and the list of tensors. Everything is checked before it is used.

A file is a magic number, a version, two counts, key/value pairs, tensor infos, padding and the tensors' data. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Versions 2 and 3 are read, in little-endian byte order.
"""

import math
import mmap
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.types import TENSOR_TYPES, UNSUPPORTED_TYPES
from quire.config.checkpoint.tensors import MappedTensor

DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {number: struct.Struct(f"<{code}") for number, code in _CODES.items()}
"""The types of values that have a fixed size."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_MAX_KEYS = 65_536
_MAX_TENSORS = 65_536
_MAX_NAME_BYTES = 65_535
_MAX_STRING_BYTES = 16 * 1024**2
_MAX_ARRAY_LEN = 2**24
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20
_MAX_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, which is decoded when it is asked for. Its bounds were checked."""

    source: str
    """The file and the key, for error messages."""
    type: int
    length: int
    data: mmap.mmap
    start: int

    def strings(self) -> list[str]:
        """The strings. Raises CheckpointError if the array holds something else, or text that is not UTF-8."""
        if self.type != _STRING:
            raise CheckpointError(f"{self.source} must be an array of strings")
        found, data, position, length_at = [], self.data, self.start, _U64.unpack_from
        try:
            for _ in range(self.length):
                end = position + 8 + length_at(data, position)[0]
                found.append(data[position + 8 : end].decode())
                position = end
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.source}: string {len(found)} is not valid UTF-8") from error
        return found

    def numbers(self) -> list[Any]:
        """The numbers or truth values. Raises CheckpointError if the array holds strings."""
        if self.type == _STRING:
            raise CheckpointError(f"{self.source} must be an array of numbers")
        values = struct.unpack_from(f"<{self.length}{_CODES[self.type]}", self.data, self.start)
        return [bool(value) for value in values] if self.type == _BOOL else list(values)


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says about itself and its tensors."""

    metadata: dict[str, Any]
    """Numbers, truth values and strings as in Python; arrays as Array."""
    tensors: dict[str, MappedTensor]
    """In the order of their data."""


def read_header(path: Path) -> Header:
    """Return the header of `path`. Raises CheckpointError if the file cannot be read or is malformed, and
    UnsupportedModelError for a version, byte order or tensor type that Quire does not read."""
    try:
        with path.open("rb") as file:
            start = file.read(24)
            if start[:4] != _MAGIC:
                raise CheckpointError(f"{path} does not begin with 'GGUF': it is not a GGUF file, or incomplete")
            if len(start) < 24:
                raise CheckpointError(f"{path} is truncated: {len(start)} bytes, not even the beginning of a header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return _Reader(path, data).read()


class _Reader:
    """One pass over a header. `position` is where the next value begins."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = len(_MAGIC)

    def read(self) -> Header:
        version = self.scalar(_U32, "its version")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "is in big-endian byte order" if is_swapped else f"has version {version} of the format"
            raise UnsupportedModelError(f"{self.path} {what}: Quire reads versions 2 and 3, little-endian")
        num_tensors = self.count("tensors", _MAX_TENSORS, 24)
        num_keys = self.count("keys", _MAX_KEYS, 12)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a key", _MAX_NAME_BYTES)
            if key in metadata:
                raise self.wrong(f"the key {reprlib.repr(key)} appears twice")
            metadata[key] = self.value(key, self.scalar(_U32, f"the type of {reprlib.repr(key)}"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & alignment - 1:
            raise self.wrong(f"general.alignment is {reprlib.repr(alignment)}, but must be a power of two up to 1 MiB")
        tensors = [self.tensor(alignment) for _ in range(num_tensors)]
        return Header(metadata, self.placed(tensors, alignment))

    def scalar(self, kind: struct.Struct, what: str) -> Any:
        """The next number."""
        try:
            (value,) = kind.unpack_from(self.data, self.position)
        except struct.error:
            raise self.wrong(f"truncated at {what}") from None
        self.position += kind.size
        return value

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """The next count, of things of at least `least_bytes` bytes each."""
        value: int = self.scalar(_U64, f"the number of {what}")
        if value > (most := min(limit, (len(self.data) - self.position) // least_bytes)):
            raise self.wrong(f"its header promises {value} {what}, but at most {most} can follow: truncated or damaged")
        return value

    def string(self, what: str, limit: int) -> str:
        """The next string."""
        length = self.scalar(_U64, f"the length of {what}")
        end = self.position + length
        if length > limit or end > len(self.data):
            raise self.wrong(
                f"{what} has a length of {length} bytes; at most {limit} are allowed, and the file has {len(self.data)}"
            )
        start, self.position = self.position, end
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not valid UTF-8") from None

    def value(self, key: str, kind: int) -> Any:
        """The next value of a key."""
        name = reprlib.repr(key)
        if kind == _STRING:
            return self.string(f"the value of {name}", _MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.wrong(f"the value of {name} has the unknown type {kind}")
        value = self.scalar(_SCALARS[kind], f"the value of {name}")
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.wrong(f"the value of {name} is {value}, but must be 0 or 1, for false or true")
        return bool(value)

    def array(self, key: str) -> Array:
        """The next array: its place, and a check that it lies in the file."""
        name = reprlib.repr(key)
        kind = self.scalar(_U32, f"the type of {name}")
        if kind != _STRING and kind not in _SCALARS:
            nested = "; arrays of arrays are not supported" if kind == _ARRAY else ""
            raise self.wrong(f"the array {name} has items of type {kind}{nested}")
        item_bytes = 8 if kind == _STRING else _SCALARS[kind].size
        length = self.count(f"items of {name}", _MAX_ARRAY_LEN, item_bytes)
        start = self.position
        if kind == _STRING:
            self.skip_strings(name, length)
        else:
            self.position += length * item_bytes
        return Array(f"{self.path}: {name}", kind, length, self.data, start)

    def skip_strings(self, name: str, count: int) -> None:
        """Go over strings, whose lengths are all that is read."""
        data, position, end, length_at = self.data, self.position, len(self.data), _U64.unpack_from
        try:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
        except (struct.error, OverflowError):
            position = end + 1
        if position > end:
            raise self.wrong(f"truncated, or a string of the array {name} is longer than the file")
        self.position = position

    def tensor(self, alignment: int) -> MappedTensor:
        """The next tensor's info. Its offset still counts from the start of the data."""
        name = self.string("the name of a tensor", _MAX_NAME_BYTES)
        shown = f"tensor {reprlib.repr(name)}"
        num_dimensions = self.scalar(_U32, f"the shape of {shown}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.wrong(f"{shown} has {num_dimensions} dimensions: must be 1 to {_MAX_DIMENSIONS}")
        shape = [self.scalar(_U64, f"the shape of {shown}") for _ in range(num_dimensions)][::-1]
        number = self.scalar(_U32, f"the type of {shown}")
        offset = self.scalar(_U64, f"the offset of {shown}")
        if number not in TENSOR_TYPES:
            if number in UNSUPPORTED_TYPES:
                supported = ", ".join(kind.name for kind in TENSOR_TYPES.values())
                raise UnsupportedModelError(
                    f"{self.path}: {shown} is of type {UNSUPPORTED_TYPES[number]}; supported are {supported}"
                )
            raise self.wrong(f"{shown} has the unknown type {number}")
        kind = TENSOR_TYPES[number]
        if not all(shape) or math.prod(shape) > _MAX_BYTES or shape[-1] % kind.elements:
            raise self.wrong(
                f"{shown} of type {kind.name} has shape {shape}: sizes must be at least 1, and rows multiples of "
                f"{kind.elements}"
            )
        num_bytes = math.prod(shape) // kind.elements * kind.num_bytes
        if offset % alignment or offset + num_bytes > len(self.data):
            raise self.wrong(
                f"{shown} should lie at {offset} and have {num_bytes} bytes: not a multiple of {alignment}, or beyond "
                f"the end of the file of {len(self.data)} bytes (truncated: download it again)"
            )
        if not kind.is_block:
            return MappedTensor(name, kind.dtype, tuple(shape), num_bytes, self.path, offset)
        stored = (*shape[:-1], shape[-1] // kind.elements * kind.num_bytes)
        return MappedTensor(
            name, kind.dtype, stored, num_bytes, self.path, offset, block_type=kind.name, block_shape=tuple(shape)
        )

    def placed(self, tensors: list[MappedTensor], alignment: int) -> dict[str, MappedTensor]:
        """Tensors by name, with offsets from the start of the file. They must follow each other, with padding alone
        between them and behind the last."""
        end = padded(self.position, alignment)
        data_start, found = end, dict[str, MappedTensor]()
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            name, offset = reprlib.repr(tensor.name), data_start + tensor.offset
            if tensor.name in found:
                raise self.wrong(f"there are two tensors {name}")
            if offset != end:
                what = "overlaps" if offset < end else "leaves a hole after"
                raise self.wrong(f"tensor {name} {what} what is before it: the offsets in the header are wrong")
            found[tensor.name] = tensor.placed_at(offset)
            end = padded(offset + tensor.num_bytes, alignment)
            if offset + tensor.num_bytes > len(self.data):
                raise self.wrong(
                    f"truncated: the header promises {offset + tensor.num_bytes} bytes, the file has {len(self.data)} "
                    "(download it again)"
                )
        if tensors and len(self.data) > end:
            raise self.wrong(f"{len(self.data) - end} bytes after the last tensor: not what the header says")
        return found

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")


def padded(position: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-position // alignment) * alignment
