"""Host memory for the outputs of kernels, which stays mapped from step to step, and for KV caches."""

import ctypes
import math
import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from quire.common.errors import OutOfMemoryError
from quire.common.faults import fault_point

_ALIGNMENT = 64
_REGION_BYTES = 256 * 1024**2  # of address space; pages are taken from the machine only when first written
_SHARED_BYTES = 64 * 1024**2  # of a region that weights share
_RESTING = 4  # pieces: what a norm reads, and what else is returned when its layer ends
_SMALL_BYTES = 64 * 1024  # the system's allocator keeps pieces up to here, and is faster


class Workspace:
    """While a thread has entered it, kernels put their outputs into it: first fit, in regions that only grow.

    Fresh memory costs a page fault for every few kilobytes, as much as a small kernel. A tensor's place is free again
    once the last view of the tensor is gone. So the same calls in the same order find the same places, which a
    KernelGraph relies on.
    """

    def __init__(self, region_bytes: int = _REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._regions: list[_Region] = []
        self._is_recording = False
        self._resting = 0  # pieces that were returned last and are not used again yet
        self._outer: list[Workspace | None] = []

    def __enter__(self) -> None:
        self._outer.append(_active.workspace)
        _active.workspace = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.workspace = self._outer.pop()

    @contextmanager
    def recording(self, *, joins_norms: bool = False) -> Iterator[None]:
        """Enter it, and place every output in it, small ones too: a replay will write to the same places.

        With `joins_norms` the pieces that were returned last are not used again yet: what a norm reads is then still
        there during the product that comes next, which can compute the norm itself.
        """
        with self:
            self._is_recording, self._resting = True, _RESTING if joins_norms else 0
            try:
                yield
            finally:
                self._is_recording, self._resting = False, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As torch.empty."""
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < _SMALL_BYTES and not (self._is_recording and num_bytes):
            return torch.empty(shape, dtype=dtype)
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        taken = (region.take(num_bytes, self._resting) for region in self._regions)
        piece = next((piece for piece in taken if piece is not None), None)
        if piece is None:
            self._regions.append(_Region(max(num_bytes, self._region_bytes)))
            piece = self._regions[-1].take(num_bytes)
            assert piece is not None
        with torch._C._DisableTorchDispatch():  # a recording, which looks at all else, need not look at this
            return torch.frombuffer(piece, dtype=dtype, count=count).view(shape)

    def holds(self, address: int) -> bool:
        """Whether the address lies in one of its regions."""
        return any(0 <= address - region.address < region.num_bytes for region in self._regions)

    @property
    def num_bytes_taken(self) -> int:
        """Bytes in tensors that are alive."""
        return sum(region.num_bytes_taken for region in self._regions)


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Anonymous memory, in whole pages: in huge ones where the system grants them. Raises OutOfMemoryError."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemoryError(
            f"the machine refused {num_bytes} bytes: {error}; lower kv_cache_memory or max_num_batched_tokens"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a hint, which a system without huge pages refuses
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Region:
    """Anonymous memory, and which parts of it are free."""

    def __init__(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memoryview(_huge_pages(num_bytes))
        self.address, self.num_bytes = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), num_bytes
        self._free = [(0, num_bytes)]  # sorted, none touching the next
        self._taken: dict[int, tuple[weakref.ref[memoryview], tuple[int, int]]] = {}
        self._returned: deque[tuple[int, int]] = deque()  # appended to when a tensor dies, which may be within `take`

    def take(self, num_bytes: int, resting: int = 0) -> memoryview | None:
        """A piece that is returned when nothing refers to it any more, or None if none is long enough. The `resting`
        last returned ones are not free."""
        self._merge(resting)
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                self._free[i : i + 1] = [(start + num_bytes, end)] if end - start > num_bytes else []
                piece = self._memory[start : start + num_bytes]
                alive = weakref.ref(piece, self._give_back)  # `weakref.finalize` takes as long as a small kernel
                self._taken[id(alive)] = alive, (start, start + num_bytes)
                return piece
        return None

    def _give_back(self, piece: weakref.ref[memoryview]) -> None:
        self._returned.append(self._taken.pop(id(piece))[1])

    @property
    def num_bytes_taken(self) -> int:
        self._merge()
        return len(self._memory) - sum(end - start for start, end in self._free)

    def _merge(self, resting: int = 0) -> None:
        """Make returned pieces free but for the last ones, each joined with the free pieces that it touches."""
        if len(self._returned) <= resting:
            return
        while len(self._returned) > resting:
            insort(self._free, self._returned.popleft())
        merged = self._free[:1]
        for start, end in self._free[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged


class _Active(threading.local):
    workspace: Workspace | None = None


_active = _Active()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An output for a kernel: from the workspace that this thread has entered, or memory of its own."""
    fault_point("memory.workspace")
    workspace = _active.workspace
    return torch.empty(shape, dtype=dtype) if workspace is None else workspace.empty(shape, dtype)


class WeightMemory:
    """Memory for matrices. Small ones share regions, since what lies in huge pages is read a third faster. A region is
    returned to the system when all its matrices are gone. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: Callable[[], mmap.mmap | None] = lambda: None
        """The region in use, if a matrix in it is alive."""
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned for kernels, with any contents."""
        if not _SMALL_BYTES <= num_bytes < _SHARED_BYTES // 4:
            return torch.empty(num_bytes, dtype=torch.uint8)
        with self._lock:
            region = self._region()
            if region is None or self._used + num_bytes > _SHARED_BYTES:
                region, self._used = _huge_pages(_SHARED_BYTES), 0
                self._region = weakref.ref(region)
            piece = memoryview(region)[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(piece, dtype=torch.uint8)


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, not kept alive: its Workspace may reuse it for other outputs."""
    memory = (ctypes.c_char * (_span(tensor) * tensor.itemsize)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def lent(tensor: Tensor) -> Tensor:
    """The tensor; borrowed, if it lies in the workspace that this thread has entered."""
    workspace = _active.workspace
    is_inside = workspace is not None and tensor.numel() > 0 and workspace.holds(tensor.data_ptr())
    return borrowed(tensor) if is_inside else tensor


def placed(tensor: Tensor) -> Tensor:
    """A copy as `empty` places it, whose dimensions follow each other in memory as the tensor's do, if it is dense."""
    is_dense = tensor.numel() > 0 and _span(tensor) == tensor.numel()
    place = empty((tensor.numel(),), tensor.dtype)
    place = place.as_strided(tensor.shape, tensor.stride()) if is_dense else place.view(tensor.shape)
    return place.copy_(tensor)


def _span(tensor: Tensor) -> int:
    """Elements from the first one to the last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def zeroed_blocks(num_blocks: int, block_bytes: int) -> Tensor:
    """Zeros [num_blocks, block_bytes] uint8, aligned for kernels. Pages are taken when first written."""
    num_bytes = num_blocks * block_bytes
    try:
        memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"the machine refused {num_bytes} bytes: give a smaller kv_cache_memory, or load fewer adapters"
        ) from error
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(num_blocks, block_bytes)
