"""The tensors of a checkpoint: what every format offers the loader, and the mapped files that most formats are."""

import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from quire.common.errors import CheckpointError
from quire.config.machine import machine_memory

_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
"""MAP_NORESERVE, which Python 3.11 does not name: nothing writes to the pages, so files may be larger than memory."""
_MAX_NAMED = 20


def named(names: Sequence[str]) -> str:
    """Names from a file, as an error message lists them: some of them, cut, and without control characters."""
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:_MAX_NAMED])
    return shown + " and others" * (len(names) > _MAX_NAMED)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts about a tensor that are known before it is read. Its elements are stored row by row."""

    name: str
    dtype: str
    """The dtype as torch and NumPy spell it: float32, bfloat16, uint8. Blocks of bits that only a kernel understands
    are rows of uint8."""
    shape: tuple[int, ...]
    num_bytes: int
    block_type: str | None = field(default=None, kw_only=True)
    """The type of the blocks in which the elements are stored, such as q4_k; None for plain numbers."""
    block_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    """The shape of the tensor that the blocks stand for."""

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the tensor, however it is stored."""
        return self.block_shape or self.shape


class Checkpoint(Protocol):
    """The tensors of a folder, whose headers were validated when it was opened. Opening reads no weights."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the checkpoint."""

    def reading(self, name: str, rows: tuple[int, int] | None = None) -> AbstractContextManager[memoryview]:
        """The bytes of a tensor, or of `rows` = (first, end) of its first dimension, for one pass over them.

        The buffer must be writable, since torch takes no other, but nothing writes to it. It stays valid as long as
        something refers to it; after the context it may be slow to touch again.
        """


@dataclass(frozen=True, slots=True)
class MappedTensor(TensorInfo):
    """A tensor that lies in one piece in a file, `offset` bytes from its start."""

    path: Path
    offset: int

    def placed_at(self, offset: int) -> "MappedTensor":
        """The same tensor at another place of the file."""
        return replace(self, offset=offset)


class MappedCheckpoint:
    """A Checkpoint of mapped files: nothing is copied, and a page is read when it is first touched."""

    def __init__(self, tensors: Mapping[str, MappedTensor]) -> None:
        self.tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    @contextmanager
    def reading(self, name: str, rows: tuple[int, int] | None = None) -> Iterator[memoryview]:
        """As Checkpoint says. On leaving, the pages no longer count as this process's memory."""
        info = self.tensors[name]
        start, end = info.offset, info.offset + info.num_bytes
        if rows is not None:
            row_bytes = info.num_bytes // info.shape[0]
            start, end = start + rows[0] * row_bytes, start + rows[1] * row_bytes
        if start == end:  # a file without data cannot be mapped
            yield memoryview(bytearray())
            return
        mapping = self._mapping(info.path)
        yield memoryview(mapping)[start:end]
        whole_pages = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > whole_pages:
            mapping.madvise(mmap.MADV_DONTNEED, whole_pages, end - whole_pages)

    def _mapping(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            needed = max(info.offset + info.num_bytes for info in self.tensors.values() if info.path == path)
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            if len(mapping) < needed:
                raise CheckpointError(
                    f"{path} was cut to {len(mapping)} bytes after its header was read, which promises {needed}: do "
                    "not change a checkpoint's files in place"
                )
            if len(mapping) <= machine_memory().available_bytes:  # else the end would displace the beginning
                mapping.madvise(mmap.MADV_WILLNEED)  # read ahead in large pieces, while the first are packed
            self._maps[path] = mapping
        return self._maps[path]
